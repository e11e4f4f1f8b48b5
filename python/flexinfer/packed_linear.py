"""PackedLinear: a linear layer whose weight lies in the order in which this CPU's kernel reads it.

oneDNN brings a bfloat16 weight into its blocked order at each call, which for the few rows of a
decode step costs as much as the product. Measured on 2 cores with AMX, over all layers of a model
of 28 million weights, ahead of packing and after: 1 row 4.1 and 2.6 ms, 8 rows 4.1 and 2.6, 30 rows
4.2 and 3.2, 1,024 rows 32 and 34. In float32 MKL does as well on plain weights (3.1 and 5.2; 6.8
and 6.8; 11.9 and 10.4; 176 and 193 ms): those are not packed. The operators are those that torch's
own compiler emits for CPUs.
"""

from __future__ import annotations

from functools import cache
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch

PACKED_DTYPES = (torch.bfloat16,)


OPERATOR = "packed_linear(Tensor x, int layer, int out_features) -> Tensor"

_layers: WeakValueDictionary[int, PackedLinear] = WeakValueDictionary()
_next_layer = count()


class PackedLinear(torch.nn.Module):
    """x [..., in_features] -> [..., out_features]. Not for training.

    In a compiled model it is the operator flexinfer::packed_linear, as a compiled graph can take no
    opaque weight for its input: the operator finds it by the layer's number.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """weight: [out_features, in_features], copied into its packed form."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = pack_weight(weight)
        """Opaque, but for its dtype and device."""
        self.bias = None if bias is None else bias.detach()
        register()
        self.number = next(_next_layer)
        _layers[self.number] = self

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """residual: [..., out_features], added while the product is still in registers."""
        if torch.compiler.is_compiling():
            output: torch.Tensor = torch.ops.flexinfer.packed_linear(
                x, self.number, self.out_features
            )
            return output if residual is None else residual + output
        if residual is not None:
            return linear_pointwise(x, residual, self.weight, self.bias, "add")
        return linear_pointwise(x, self.weight, self.bias, "none", [], "")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


@cache
def register() -> torch.library.Library:
    """Make the operator known to torch; once a process. It lives as long as the library object."""
    library = torch.library.Library("flexinfer", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(OPERATOR)  # type: ignore[no-untyped-call]
    library.impl("packed_linear", _packed_linear, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake("flexinfer::packed_linear", _packed_linear_shape, lib=library)
    return library


def _packed_linear(x: torch.Tensor, layer: int, out_features: int) -> torch.Tensor:
    packed = _layers[layer]
    return linear_pointwise(x, packed.weight, packed.bias, "none", [], "")


def _packed_linear_shape(x: torch.Tensor, layer: int, out_features: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
    return packed


def linear_pointwise(*arguments: Any) -> torch.Tensor:
    output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(*arguments)
    return output


def add_linear(
    linear: torch.nn.Module, x: torch.Tensor, residual: torch.Tensor | None
) -> torch.Tensor:
    """residual + linear(x), in one call where the layer can."""
    if residual is None:
        return linear(x)  # type: ignore[no-any-return]
    if isinstance(linear, PackedLinear):
        return linear(x, residual)  # type: ignore[no-any-return]
    return residual + linear(x)  # type: ignore[no-any-return]


def join_linears(*linears: torch.nn.Linear) -> torch.nn.Linear:
    """One layer whose output is theirs, one after the other. Their weights are copied."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    joined = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    joined.weight = torch.nn.Parameter(weight, requires_grad=False)
    biases = [linear.bias for linear in linears]
    if any(bias is not None for bias in biases):
        parts = [
            weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
            for linear in linears
        ]
        joined.bias = torch.nn.Parameter(torch.cat(parts), requires_grad=False)
    return joined


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN has a packed kernel for this dtype here."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return dtype in PACKED_DTYPES and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def pack_linears(model: torch.nn.Module) -> int:
    """Replace the model's linear layers by packed ones, one by one, so that the memory of two
    weights is never held for all; returns how many.

    Left as they are: weights that something else uses too, such as a head tied to the embedding,
    and dtypes without a packed kernel.
    """
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            uses[parameter.data_ptr()] = uses.get(parameter.data_ptr(), 0) + 1
    num_packed = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            weight = _weight_of(child)
            if weight is None or uses[weight.data_ptr()] > 1:
                continue
            if can_pack(weight.dtype, weight.device):
                bias: Any = child.bias
                setattr(parent, name, PackedLinear(weight, bias))
                num_packed += 1
    return num_packed


def _weight_of(module: torch.nn.Module) -> torch.Tensor | None:
    """[out_features, in_features]; None: not a plain linear layer, or one that is being watched."""
    if module._forward_hooks or module._forward_pre_hooks:
        return None
    if type(module) is torch.nn.Linear:
        return module.weight
    from transformers.pytorch_utils import Conv1D

    if type(module) is Conv1D:
        weight: torch.Tensor = module.weight.t()
        return weight
    return None
