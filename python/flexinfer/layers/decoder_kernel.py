"""DecoderKernel: a decoder layer in one call of our own kernel, for the few rows of a decode step,
or all layers of a model (`forward_layers`).

A layer is nine calls of kernels, and what Python takes between them, 0.12 ms, was a tenth of a
decode step of one request. The kernel (cpp/kernels/layer) makes the same calls in the same order:
the same bits. Of a layer with a mixture of experts it is all up to them. Where a layer has parts
that the kernel does not know, or a step wants something else, the parts are called one by one,
which also is the reference of the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from flexinfer import _kernels
from flexinfer.attention.hook import kernel_call
from flexinfer.layers import host_linear, quantised_linear, rows
from flexinfer.layers.activation import GELU_TANH, SILU
from flexinfer.layers.adapters import are_in_force
from flexinfer.layers.attention import FusedAttention
from flexinfer.layers.host_linear import HostLinear
from flexinfer.layers.joined_linear import JoinedLinear
from flexinfer.layers.linear import Linear
from flexinfer.layers.mlp import GatedMLP
from flexinfer.layers.norm import RMSNorm
from flexinfer.layers.quantised_linear import QuantisedLinear
from flexinfer.runtime.kernels import DTYPES

MAX_ROWS = host_linear.MAX_FEW_ROWS
"""With more, layers have other ways, and the time between calls is little beside them."""
NO_NORM = (0, 0.0, False)


class LayerNorms(NamedTuple):
    """Before attention and the MLP, and, where there are some, behind them."""

    attention: torch.nn.Module
    mlp: torch.nn.Module
    behind_attention: torch.nn.Module | None = None
    behind_mlp: torch.nn.Module | None = None


class DecoderKernel:
    """REQUIRES parts that `make_decoder_kernel` has accepted, and that live as long."""

    def __init__(self, attention: FusedAttention, mlp: GatedMLP | None, norms: LayerNorms) -> None:
        """mlp: None for one that the caller computes."""
        dtype = _dtype(attention.o_proj)
        activation = SILU if mlp is None else mlp.activation
        assert activation is not None
        self.shape = (attention.o_proj.out_features, attention.head_dim, dtype)
        """Width, head_dim and dtype."""
        self.has_mlp = mlp is not None
        self._num_heads = attention.num_heads
        self._layer_idx = attention.layer_idx
        self._options = attention.options
        self.native = _kernels.DecoderLayer(
            dtype=DTYPES[dtype],
            row_ops=rows.kernel(),
            linear=host_linear.kernel(),
            quantised=quantised_linear.kernel(),
            input_norm=_norm(norms.attention),
            output_norm=_norm(norms.mlp),
            query_norm=_norm(attention.q_norm),
            key_norm=_norm(attention.k_norm),
            attention_norm=_norm(norms.behind_attention),
            mlp_norm=_norm(norms.behind_mlp),
            qkv=[_product(part) for part in _parts(attention.qkv_proj)],
            o=_product(attention.o_proj),
            gate_up=[] if mlp is None else [_product(part) for part in _parts(mlp.gate_up_proj)],
            down=None if mlp is None else _product(mlp.down_proj),
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            activation=activation.kind.value,
        )

    def forward(
        self, x: torch.Tensor, positions: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """x: [1, tokens, width]; positions: cos and sin [1, tokens, head_dim]. Returns the layer's
        output; or, without an MLP, what its output is added to, and its input. None: this step is
        for the parts one by one."""
        return forward_layers([self], x, positions)

    def attention(self, num_rows: int) -> Any | None:
        """Its call of attention in a step of so many rows; None: it cannot be told."""
        _, head_dim, dtype = self.shape
        call = kernel_call(self._layer_idx, self._num_heads, head_dim, dtype, **self._options)
        return None if call is None or call.num_tokens != num_rows else call.arguments


def forward_layers(
    kernels: Sequence[DecoderKernel],
    x: torch.Tensor,
    positions: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """`DecoderKernel.forward` of layers one after the other. REQUIRES: they have one shape; all but
    the last have their MLP."""
    num_rows, (cos, sin) = x.shape[1], positions
    width, head_dim, dtype = kernels[-1].shape
    if not (
        num_rows <= MAX_ROWS
        and x.shape == (1, num_rows, width)
        and cos.shape == sin.shape == (1, num_rows, head_dim)
        and x.dtype == cos.dtype == sin.dtype == dtype
        and x.is_contiguous()
        and not are_in_force()
    ):
        return None
    attention = []
    for kernel in kernels:
        arguments = kernel.attention(num_rows)
        if arguments is None:
            return None
        attention.append(arguments)
    cos, sin = cos.contiguous(), sin.contiguous()
    output = torch.empty_like(x)
    normed = None if kernels[-1].has_mlp else torch.empty_like(x)
    _kernels.forward_decoder_layers(
        [kernel.native for kernel in kernels],
        attention,
        x.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        output.data_ptr(),
        0 if normed is None else normed.data_ptr(),
        num_rows,
        torch.get_num_threads(),
    )
    return output, normed


def make_decoder_kernel(
    attention: FusedAttention, mlp: GatedMLP | None, norms: LayerNorms
) -> DecoderKernel | None:
    """mlp: as DecoderKernel takes it. None: a part is of a kind that the kernel does not know."""
    of_rows = [norm for norm in norms if norm is not None]
    of_heads = [norm for norm in (attention.q_norm, attention.k_norm) if norm is not None]
    linears = [*_parts(attention.qkv_proj), attention.o_proj]
    if mlp is not None:
        linears += [*_parts(mlp.gate_up_proj), mlp.down_proj]
    is_norm = all(type(norm) is RMSNorm for norm in (*of_rows, *of_heads))
    if not (is_norm and all(map(_is_known, linears))):
        return None
    if not _shapes_fit(attention, mlp, of_rows, of_heads):
        return None
    dtypes = {norm.weight.dtype for norm in (*of_rows, *of_heads) if not norm.is_wide}
    dtypes |= {_dtype(linear) for linear in linears}
    is_gated = mlp is None or mlp.activation in (SILU, GELU_TANH)
    if len(dtypes) != 1 or not (attention.rotates and is_gated):
        return None
    return DecoderKernel(attention, mlp, norms)


def _shapes_fit(
    attention: FusedAttention,
    mlp: GatedMLP | None,
    of_rows: list[torch.nn.Module],
    of_heads: list[torch.nn.Module],
) -> bool:
    """The kernel trusts its addresses: what it will read must be there."""
    width, dim = attention.o_proj.out_features, attention.head_dim
    num_columns = (attention.num_heads + 2 * attention.num_kv_heads) * dim
    linears = [attention.qkv_proj, attention.o_proj]
    expected = [(num_columns, width), (width, attention.num_heads * dim)]
    if mlp is not None:
        linears += [mlp.gate_up_proj, mlp.down_proj]
        hidden = mlp.down_proj.in_features
        expected += [(2 * hidden, width), (width, hidden)]
    shapes = [(linear.out_features, linear.in_features) for linear in linears]
    norms = [(norm, width) for norm in of_rows] + [(norm, dim) for norm in of_heads]
    return shapes == expected and all(norm.weight.shape == (size,) for norm, size in norms)


def _parts(linear: Linear) -> list[Linear]:
    """The layers whose outputs, one after the other, are those of this one."""
    return linear.parts if type(linear) is JoinedLinear else [linear]


def _is_known(linear: Linear) -> bool:
    """In a format of our own kernels, without outputs that only fill it up."""
    if linear.out_features % quantised_linear.COLUMNS_STEP:
        return False
    return type(linear) is HostLinear or type(linear) is QuantisedLinear


def _dtype(linear: Linear) -> torch.dtype:
    assert isinstance(linear, HostLinear | QuantisedLinear)
    return linear.dtype


def _norm(norm: torch.nn.Module | None) -> tuple[int, float, bool]:
    if norm is None:
        return NO_NORM
    assert isinstance(norm, RMSNorm)
    return norm.weight.data_ptr(), norm.variance_epsilon, norm.is_wide


def _product(linear: Linear) -> _kernels.Product:
    assert isinstance(linear, HostLinear | QuantisedLinear)
    return linear.product()
