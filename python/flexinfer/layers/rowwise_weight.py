"""RowwiseWeight: a weight whose products by torch's `linear` are those of our own kernel.

The code of a router multiplies by its weight itself, in float32 or in the model's dtype, before it
chooses the experts, in a dozen ways. torch's product of a row hangs on how many rows there are, in
the last bits, and so would the experts that are chosen, and the answer. The code stays as it is:
its `linear` of such a weight is a product whose rows hang on no other; all else sees a parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from flexinfer.layers import host_linear
from flexinfer.layers.host_linear import HostLinear
from flexinfer.layers.recognise import modules_read_by
from flexinfer.layers.tied_head import PanelEmbedding

_LOOKED_UP = (torch.nn.Embedding, PanelEmbedding)
CONVERSIONS = (torch.Tensor.to, torch.Tensor.type, torch.Tensor.float)


class RowwiseWeight(torch.nn.Parameter):
    """[out_features, in_features], which `host_linear.can_run` accepts. Not for training."""

    _product: HostLinear | None
    _in_float32: RowwiseWeight | None

    def __new__(cls, weight: torch.Tensor, requires_grad: bool = False) -> RowwiseWeight:
        """requires_grad: False, as whoever copies it says."""
        made: RowwiseWeight = torch.Tensor._make_subclass(cls, weight.detach(), requires_grad)
        made._product = made._in_float32 = None
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.nn.functional.linear and not torch.compiler.is_compiling():
                return _linear(*args, **(kwargs or {}))
            found = func(*args, **(kwargs or {}))
            if func in CONVERSIONS and found.dtype == torch.float32:
                return _kept(args[0], found)
            return found


def _kept(weight: RowwiseWeight, in_float32: torch.Tensor) -> torch.Tensor:
    """The weight in float32, made once."""
    if weight.dtype == torch.float32:
        return weight
    if weight._in_float32 is None:
        weight._in_float32 = RowwiseWeight(in_float32)
    return weight._in_float32


def _linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As torch's. The bias is added to what has been rounded."""
    if not isinstance(weight, RowwiseWeight) or x.dtype != weight.dtype:
        return torch.nn.functional.linear(x, weight, bias)
    if weight._product is None:
        weight._product = HostLinear(weight, None)
    output: torch.Tensor = weight._product(x)
    return output if bias is None else output + bias


def make_rowwise(model: torch.nn.Module, uses: Counter[int]) -> int:
    """Let the weights by which code multiplies itself be rowwise; tells how many. uses: how many
    parameters lie at an address; those of several modules stay."""
    count = 0
    for module in _multiplied_by_others(model):
        weight = module._parameters.get("weight")
        if type(weight) is not torch.nn.Parameter or uses[weight.data_ptr()] > 1:
            continue
        if host_linear.supports(weight):
            module._parameters["weight"] = RowwiseWeight(weight)
            count += 1
    return count


def _multiplied_by_others(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Modules whose weight is not for code of torch's."""
    for module in model.modules():
        if not (type(module).__module__.startswith("torch.") or isinstance(module, _LOOKED_UP)):
            yield module
        yield from modules_read_by(module)
