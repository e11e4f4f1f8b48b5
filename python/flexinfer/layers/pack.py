"""Linear layers of a model: packed for this CPU, joined, and added to a residual."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from flexinfer.layers import host_linear as panel_linear
from flexinfer.layers.host_linear import PanelLinear
from flexinfer.layers.onednn_linear import PackedLinear, can_pack
from flexinfer.runtime.weight_files import drop_pages


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


def parents(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Its modules that have children, while some are replaced: those are not kept, so that their
    weights are free at once."""
    modules = [
        weakref.ref(module)
        for module in model.modules()
        if next(module.children(), None) is not None
    ]
    for reference in modules:
        module = reference()
        if module is not None:
            yield module


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
    for parent in parents(model):
        for name, child in list(parent.named_children()):
            weight = _weight_of(child)
            if weight is None or uses[weight.data_ptr()] > 1:
                continue
            packed = packed_class(weight)
            if packed is not None:
                bias: Any = child.bias
                setattr(parent, name, packed(weight, bias))
                drop_pages([weight])
                num_packed += 1
    return num_packed


def packed_class(weight: torch.Tensor) -> type[PackedLinear] | None:
    """What to pack this weight [out_features, in_features] into; None: nothing here is better than
    torch."""
    if panel_linear.supports(weight):
        return PanelLinear
    # In float32 MKL does as well on plain weights.
    is_better = weight.dtype == torch.bfloat16 and can_pack(weight.dtype, weight.device)
    return PackedLinear if is_better else None


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
