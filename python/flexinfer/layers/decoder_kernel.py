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
from typing import Any

import torch

from flexinfer import _kernels
from flexinfer.attention.hook import kernel_call
from flexinfer.layers import host_linear, quantised_linear, rows
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
NO_NORM = (0, 0.0)


class DecoderKernel:
    """REQUIRES parts that `make_decoder_kernel` has accepted, and that live as long."""

    def __init__(
        self, attention: FusedAttention, mlp: GatedMLP | None, norms: tuple[RMSNorm, RMSNorm]
    ) -> None:
        """mlp: None for one that the caller computes. norms: before attention, before the MLP."""
        dtype = norms[0].weight.dtype
        self.shape = (norms[0].weight.shape[0], attention.head_dim, dtype)
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
            input_norm=_norm(norms[0]),
            output_norm=_norm(norms[1]),
            query_norm=_norm(attention.q_norm),
            key_norm=_norm(attention.k_norm),
            qkv=[_product(part) for part in _parts(attention.qkv_proj)],
            o=_product(attention.o_proj),
            gate_up=[] if mlp is None else [_product(part) for part in _parts(mlp.gate_up_proj)],
            down=None if mlp is None else _product(mlp.down_proj),
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
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
    attention: FusedAttention, mlp: GatedMLP | None, norms: tuple[torch.nn.Module, torch.nn.Module]
) -> DecoderKernel | None:
    """mlp: as DecoderKernel takes it. None: a part is of a kind that the kernel does not know."""
    own_norms = [*norms, *(n for n in (attention.q_norm, attention.k_norm) if n is not None)]
    linears = [*_parts(attention.qkv_proj), attention.o_proj]
    if mlp is not None:
        linears += [*_parts(mlp.gate_up_proj), mlp.down_proj]
    if not (all(type(n) is RMSNorm for n in own_norms) and all(map(_is_known, linears))):
        return None
    if not _shapes_fit(attention, mlp, own_norms):
        return None
    dtypes = {part.weight.dtype for part in own_norms} | {_dtype(part) for part in linears}
    if len(dtypes) != 1 or not (attention.rotates and (mlp is None or mlp.is_silu)):
        return None
    first, second = norms
    assert isinstance(first, RMSNorm)
    assert isinstance(second, RMSNorm)
    return DecoderKernel(attention, mlp, (first, second))


def _shapes_fit(
    attention: FusedAttention, mlp: GatedMLP | None, norms: list[torch.nn.Module]
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
    norm_shapes = [(width,)] * 2 + [(dim,)] * (len(norms) - 2)
    return shapes == expected and [n.weight.shape for n in norms] == norm_shapes


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


def _norm(norm: RMSNorm | None) -> tuple[int, float]:
    return NO_NORM if norm is None else (norm.weight.data_ptr(), norm.variance_epsilon)


def _product(linear: Linear) -> _kernels.Product:
    assert isinstance(linear, HostLinear | QuantisedLinear)
    return linear.product()
