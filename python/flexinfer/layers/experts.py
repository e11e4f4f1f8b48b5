"""Experts: the MLPs of a mixture of experts, in one call of our own kernel.

transformers sorts the rows by expert and multiplies them with plain weights, one expert after the
other, each in a call of its own, for which bfloat16 weights are packed anew. The kernel
(cpp/kernels/layer/experts.h) does the same over weights that are packed, or quantised, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import count
from weakref import WeakValueDictionary

import torch

from flexinfer import _kernels
from flexinfer.layers import host_linear, quantised_linear, rows
from flexinfer.layers.activation import SILU, Activation
from flexinfer.layers.expert_weights import ExpertWeights, Weight
from flexinfer.layers.quantised import QuantisedWeight
from flexinfer.runtime.kernels import DTYPES
from flexinfer.runtime.torch_operators import define_operators

_experts: WeakValueDictionary[int, Experts] = WeakValueDictionary()
_next = count()


class Experts(torch.nn.Module):
    """Of each token the weighted sum of down(activation(gate(x), up(x))) over its experts, or of
    down(activation(up(x))) where they have no gates."""

    def __init__(
        self,
        gate_up: Sequence[ExpertWeights],
        down: ExpertWeights,
        dtype: torch.dtype,
        activation: Activation = SILU,
    ) -> None:
        """gate_up: of gates and factors one after the other, or of each; of factors alone where the
        activation has no gates. dtype: of inputs, outputs and biases, float32 or bfloat16. Raises
        ValueError for shapes that do not go together."""
        super().__init__()
        dtypes = {table.bias_dtype for table in (*gate_up, down)} - {None}
        if dtypes - {dtype}:
            raise ValueError(f"experts of {dtype} have biases of {', '.join(map(str, dtypes))}")
        self.weight = torch.empty(0, dtype=dtype)
        """Of no numbers: the dtype of inputs and outputs."""
        self._tables = [*gate_up, down]
        self.num_experts, self.width = down.num_experts, down.columns
        self._kernel = _kernels.Experts(
            dtype=DTYPES[dtype],
            row_ops=rows.kernel(),
            linear=host_linear.kernel(),
            quantised=quantised_linear.kernel(),
            gate_up=[table.products() for table in gate_up],
            down=down.products(),
            activation=activation.kind.value,
            alpha=activation.alpha,
            limit=activation.limit,
        )
        register()
        self.number = next(_next)
        _experts[self.number] = self

    @property
    def nbytes(self) -> int:
        """Bytes of all weights with their scales."""
        return sum(table.nbytes for table in self._tables)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states: [tokens, width]; top_k_index, top_k_weights: [tokens, experts of a token],
        as transformers calls it; the index num_experts is none, which adds nothing."""
        if not torch.compiler.is_compiling():
            return self.compute(hidden_states, top_k_index, top_k_weights)
        output: torch.Tensor = torch.ops.flexinfer.experts(
            hidden_states, top_k_index, top_k_weights, self.number
        )
        return output

    def compute(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """As forward, out of a graph. Raises ValueError for what the kernel would read beyond."""
        dtype, tokens = self.weight.dtype, x.shape[0]
        if not (
            x.shape == (tokens, self.width)
            and x.dtype == dtype
            and index.shape == weights.shape == (tokens, index.shape[-1])
            and x.is_cpu
            and index.is_cpu
            and weights.is_cpu
        ):
            raise ValueError(
                f"experts take [tokens, {self.width}] of {dtype} on the CPU, and experts and "
                f"weights of each token; got {tuple(x.shape)} {x.dtype} on {x.device}, "
                f"{tuple(index.shape)} and {tuple(weights.shape)}"
            )
        x = x.contiguous()
        index, weights = index.to(torch.int64).contiguous(), weights.float().contiguous()
        output = torch.empty_like(x)
        self._kernel.forward(
            x.data_ptr(),
            index.data_ptr(),
            weights.data_ptr(),
            output.data_ptr(),
            tokens,
            index.shape[1],
            torch.get_num_threads(),
        )
        return output

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, width={self.width}"


Biases = Sequence[torch.Tensor | None]
"""Of each expert: [outputs] of its products."""


def slow_experts(
    gate_up: Sequence[Weight],
    down: Sequence[Weight],
    x: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    biases: tuple[Biases, Biases] | None = None,
    activation: Activation = SILU,
) -> torch.Tensor:
    """The definition, and the reference of all that is computed by `Experts`: in float64, but for
    what lies between two products, which is of x's dtype. gate_up (without gates: up), down, and
    biases of both: of each expert."""
    output = torch.zeros(x.shape, dtype=torch.float64)
    first, last = biases or ([None] * len(down), [None] * len(down))
    for expert in range(len(down)):
        token, place = torch.where(index == expert)
        outputs = _product(x[token], gate_up[expert], first[expert]).to(x.dtype).float()
        hidden = activation(outputs).to(x.dtype)
        rows = _product(hidden, down[expert], last[expert]).to(x.dtype).double()
        output.index_add_(0, token, rows * weights[token, place, None].double())
    return output.to(x.dtype)


def _product(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    if isinstance(weight, QuantisedWeight):
        product = weight[:].reference(x)
    else:
        product = x.double() @ weight.double().T
    return product if bias is None else product + bias.double()


@cache
def register() -> torch.library.Library:
    """Make the operator known to torch; once a process."""
    return define_operators(
        (
            "experts(Tensor x, Tensor index, Tensor weights, int layer) -> Tensor",
            lambda x, index, weights, layer: _experts[layer].compute(x, index, weights),
            lambda x, index, weights, layer: x.new_empty(x.shape),
        )
    )
