"""Linear: a linear layer whose weight lies in one of several formats.

    make_linear(q_proj, k_proj, v_proj)
        join them          one product in place of three
        lay it out         WeightFormat  in what order the kernel reads it (`formats.py`)

A rank's shard of a layer has been cut before (`models/sharding.py`): it is a layer like any other.

In a compiled model a layer is the operator flexinfer::linear, as a compiled graph can take no
opaque weight for its input: the operator finds it by the layer's number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from functools import cache
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch

from flexinfer.layers import rows as row_ops
from flexinfer.layers.adapters import LayerAdapters, are_in_force
from flexinfer.runtime.torch_operators import define_operators

_layers: WeakValueDictionary[int, Linear] = WeakValueDictionary()
_next_layer = count()


class WeightFormat(Enum):
    """How a weight lies in memory, and so which kernel multiplies with it."""

    PLAIN = "plain"
    """torch's rows; `PlainLinear`."""
    ONEDNN = "onednn"
    """oneDNN's own blocks; `OneDnnLinear`."""
    HOST = "host"
    """Panels of our own kernel; `HostLinear`."""


class Linear(torch.nn.Module, ABC):
    """x [..., in_features] -> [..., out_features]. Not for training."""

    bias: torch.Tensor | None
    compiles_row_counts = False
    """Whether a number of rows that was not seen before costs a compilation."""
    block_rows: int | None = None
    """Rows for which the kernel reads its weight once: blocks of so many cost no more than the
    whole. None: the more at once the better."""
    adapters: LayerAdapters | None = None
    """What is added for rows that have an adapter; None: the engine has none."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """weight: [out_features, in_features]; a subclass lays it out. Raises ValueError for a bias
        of another shape than [out_features]: kernels read so many of its numbers unseen."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        if bias is not None and bias.shape != (self.out_features,):
            raise ValueError(
                f"a layer of {self.out_features} outputs got a bias of {list(bias.shape)}"
            )
        self.bias = None if bias is None else bias.detach()
        register()
        self.number = next(_next_layer)
        _layers[self.number] = self

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, *, gates: bool = False
    ) -> torch.Tensor:
        """residual: [..., out_features], added to the product. gates: as `multiply_gates`, without
        a residual."""
        if self.adapters is not None and are_in_force():
            return self._adapted(self.adapters, x, residual, gates)
        if gates:
            return self.multiply_gates(x)
        return self.multiply(x, residual)

    def _adapted(
        self, adapters: LayerAdapters, x: torch.Tensor, residual: torch.Tensor | None, gates: bool
    ) -> torch.Tensor:
        """Gates are multiplied after the adapters' part, to the same bits for other rows."""
        output = self.multiply(x, residual)
        adapters.add_to(output, x)
        return silu_gates(output) if gates else output

    @abstractmethod
    def multiply(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """residual + x weight^T + bias."""

    def multiply_gates(self, x: torch.Tensor) -> torch.Tensor:
        """silu(gates) * factors [..., out_features / 2]; the outputs are gates, then factors."""
        return silu_gates(self.multiply(x, None))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class PlainLinear(Linear):
    """By torch: on a CPU without a better format for this weight, which is not copied."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self.weight = torch.nn.Parameter(weight.detach(), requires_grad=False)
        self.parts: tuple[Any, ...] = ()
        """The layers that it was made of, where they are to be laid out later (`staying_plain`)."""

    def multiply(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        output = torch.nn.functional.linear(x, self.weight, self.bias)
        return output if residual is None else residual + output

    def multiply_gates(self, x: torch.Tensor) -> torch.Tensor:
        """In a graph by torch's operators, which its compiler fuses."""
        if not torch.compiler.is_compiling():
            return super().multiply_gates(x)
        gates, factors = self.multiply(x, None).chunk(2, dim=-1)
        return torch.nn.functional.silu(gates) * factors


class OpaqueLinear(Linear):
    """A layer whose weight only its kernel can read: in a graph it is an operator."""

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, *, gates: bool = False
    ) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            return super().forward(x, residual, gates=gates)
        output: torch.Tensor
        if gates:
            width = self.out_features // 2
            output = torch.ops.flexinfer.gated_linear(x, self.number, width)
        else:
            output = torch.ops.flexinfer.linear(x, residual, self.number, self.out_features)
        return output


def check_operands(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    depth: int,
    output: Sequence[int],
    dtype: torch.dtype,
) -> None:
    """Raises ValueError for what a kernel would read beyond. output: the shape [..., outputs]."""
    if x.dtype != dtype or not x.is_cpu or x.shape != (*output[:-1], depth):
        raise ValueError(
            f"a layer of {depth} inputs and {output[-1]} outputs of {dtype} on the CPU got "
            f"{tuple(x.shape)} {x.dtype} on {x.device}"
        )
    if residual is None:
        return
    if residual.shape != tuple(output) or residual.dtype != dtype or not residual.is_cpu:
        raise ValueError(
            f"the residual must be {tuple(output)} {dtype} on the CPU, got "
            f"{tuple(residual.shape)} {residual.dtype} on {residual.device}"
        )


def silu_gates(outputs: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half."""
    gates, factors = outputs.chunk(2, dim=-1)
    return row_ops.silu_mul(gates, factors)


@cache
def register() -> torch.library.Library:
    """Make the operators known to torch; once a process."""
    return define_operators(
        (
            "linear(Tensor x, Tensor? residual, int layer, int out_features) -> Tensor",
            _linear,
            _linear_shape,
        ),
        (
            "gated_linear(Tensor x, int layer, int width) -> Tensor",
            _gated_linear,
            _gated_linear_shape,
        ),
    )


def _linear(
    x: torch.Tensor, residual: torch.Tensor | None, layer: int, out_features: int
) -> torch.Tensor:
    return _layers[layer].multiply(x, residual)


def _linear_shape(
    x: torch.Tensor, residual: torch.Tensor | None, layer: int, out_features: int
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


def _gated_linear(x: torch.Tensor, layer: int, width: int) -> torch.Tensor:
    return _layers[layer].multiply_gates(x)


def _gated_linear_shape(x: torch.Tensor, layer: int, width: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], width)
