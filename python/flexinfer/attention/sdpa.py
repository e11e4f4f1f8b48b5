"""Attention by torch's scaled_dot_product_attention, one call per request: the reference.

K and V are read where they stand: the CPU flash kernel takes strided [heads, tokens, dim] views,
so nothing is copied or expanded. Two facts shape the code (measured on CPU):
- one query row per head is slow (4-11x in bfloat16): the query heads of a KV head become rows;
- `is_causal=True` aligns top left, which is wrong when a prefix is cached: blocks of query rows
  get a slice of one banded mask instead, and skip the keys that none of their rows sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flexinfer.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    AttentionOptions,
    LayerKV,
    store_kv,
)
from flexinfer.attention.segments import Segment

QUERY_BLOCK = 256
"""Query rows of a masked call."""
CUDA_BACKENDS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""All but cuDNN, which torch tries first on an H100: it makes a plan for each exact length, and may
find none for keys that the heads of a group see by stride 0."""


class SdpaAttention(AttentionBackend):
    """REQUIRES: num_heads a multiple of num_kv_heads."""

    def __init__(self, layers: Sequence[LayerKV]) -> None:
        super().__init__(layers)
        self._masks: dict[int | None, torch.Tensor] = {}

    def forward(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        layer = self.layers[layer_idx]
        store_kv(layer, key, value, metadata)
        num_heads, num_tokens, _ = query.shape
        output = query.new_empty(num_tokens, num_heads, layer.value_dim)
        self.attend_segments(layer, query, output, range(len(metadata.segments)), options, metadata)
        return output

    def attend_segments(
        self,
        layer: LayerKV,
        query: torch.Tensor,
        output: torch.Tensor,
        indices: Sequence[int],
        options: AttentionOptions,
        metadata: AttentionMetadata,
    ) -> None:
        """These segments of the step, whose KV is stored, into their rows of `output`."""
        with sdpa_kernel(CUDA_BACKENDS) if query.is_cuda else nullcontext():
            for i in indices:
                self.attend_segment(layer, query, output, i, options, metadata)

    def attend_segment(
        self,
        layer: LayerKV,
        query: torch.Tensor,
        output: torch.Tensor,
        i: int,
        options: AttentionOptions,
        metadata: AttentionMetadata,
    ) -> None:
        """Segment i of the step, whose KV is stored, into its rows of `output`."""
        s = metadata.segments[i]
        exact = options.softcap is not None or options.sinks is not None
        if i < metadata.num_decodes and not exact:
            self._decode(layer, query, output, s, options)
        elif s.start == 0 and not exact and sees_all(s, options):
            self._prefill(layer, query, output, s, options)
        else:
            self._blocks(layer, query, output, s, options, exact)

    def _decode(
        self,
        layer: LayerKV,
        query: torch.Tensor,
        output: torch.Tensor,
        s: Segment,
        options: AttentionOptions,
    ) -> None:
        """One token: it sees all keys of its window, so there is no mask."""
        k, v = head_views(layer, s.slot, options.first_visible(s.start), s.end)
        num_heads, _, key_dim = query.shape
        grouped = query[:, s.row].reshape(1, k.shape[1], num_heads // k.shape[1], key_dim)
        attended = scaled_dot_product_attention(grouped, k, v, scale=options.scaling)
        output[s.row] = attended.reshape(num_heads, v.shape[3])

    def _prefill(
        self,
        layer: LayerKV,
        query: torch.Tensor,
        output: torch.Tensor,
        s: Segment,
        options: AttentionOptions,
    ) -> None:
        """A prompt from its first token: plain causal."""
        k, v = head_views(layer, s.slot, 0, s.end)
        rows = slice(s.row, s.row + s.num_tokens)
        attended = grouped_sdpa(query[None, :, rows], k, v, options, is_causal=True)
        output[rows] = attended[0].transpose(0, 1)

    def _blocks(
        self,
        layer: LayerKV,
        query: torch.Tensor,
        output: torch.Tensor,
        s: Segment,
        options: AttentionOptions,
        exact: bool,
    ) -> None:
        """The general case, in blocks of query rows with an explicit mask."""
        for start in range(s.start, s.end, QUERY_BLOCK):
            end = min(start + QUERY_BLOCK, s.end)
            first = options.first_visible(start)
            k, v = head_views(layer, s.slot, first, end)
            mask = self._mask(query, start, end, first, options.sliding_window)
            if options.chunk is not None:
                mask = hide_other_chunks(mask, start, first, options.chunk)
            rows = slice(s.row + start - s.start, s.row + end - s.start)
            q = query[None, :, rows]
            if exact:
                attended = exact_attention(q, k, v, mask, options)
            else:
                # A slice of the band may start at any address; CUDA's kernel wants an aligned one.
                aligned = mask.clone() if q.is_cuda else mask
                attended = grouped_sdpa(q, k, v, options, aligned)
            output[rows] = attended[0].transpose(0, 1)

    def _mask(
        self, query: torch.Tensor, start: int, end: int, first: int, window: int | None
    ) -> torch.Tensor:
        """[end - start, end - first] of 0 and -inf: query rows [start, end), keys [first, end).

        A slice of one band [QUERY_BLOCK, width] in which row i sees the columns
        (i + offset - window, i + offset]: whatever the position, the picture is the same.
        """
        offset = start - first
        band = self._masks.get(window)
        if band is None or band.shape[1] < offset + QUERY_BLOCK or band.dtype != query.dtype:
            width = offset + 1024 + QUERY_BLOCK
            band = make_band(width, window, query.dtype, query.device)
            self._masks[window] = band
        zero = band.shape[1] - QUERY_BLOCK
        return band[: end - start, zero - offset : zero - offset + end - first]


class ExactAttention(SdpaAttention):
    """Every segment written out in matrix products: slow, and trusts no fused kernel. It judges the
    trials of those (select.py)."""

    def attend_segment(
        self,
        layer: LayerKV,
        query: torch.Tensor,
        output: torch.Tensor,
        i: int,
        options: AttentionOptions,
        metadata: AttentionMetadata,
    ) -> None:
        self._blocks(layer, query, output, metadata.segments[i], options, exact=True)


def sees_all(s: Segment, options: AttentionOptions) -> bool:
    """Whether no token before its own is hidden from any token of the segment."""
    return options.first_visible(s.end - 1) == 0


def grouped_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: AttentionOptions,
    mask: torch.Tensor | None = None,
    *,
    is_causal: bool = False,
) -> torch.Tensor:
    """SDPA with query heads in groups; no copy of K and V.

    query: [1, num_heads, rows, key_dim]; key, value: [1, num_kv_heads, keys, key_dim or value_dim];
    mask: [rows, keys]. Returns [1, num_heads, rows, value_dim].

    On CUDA only the flash kernel knows `enable_gqa`, and it knows neither masks nor float32: the
    others would fall back to materialised scores. There each KV head becomes a batch entry whose
    key and value all heads of its group see by stride 0, which all kernels take.
    """
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    if not query.is_cuda or num_heads == num_kv_heads:
        return scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=is_causal,
            scale=options.scaling,
            enable_gqa=num_heads != num_kv_heads,
        )
    return folded_sdpa(query, key, value, options, mask, is_causal=is_causal)


def folded_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: AttentionOptions,
    mask: torch.Tensor | None = None,
    *,
    is_causal: bool = False,
) -> torch.Tensor:
    """`grouped_sdpa` by folding the KV heads into the batch; see there."""
    _, num_heads, num_rows, head_dim = query.shape
    num_kv_heads = key.shape[1]
    group = num_heads // num_kv_heads
    attended = scaled_dot_product_attention(
        query.reshape(num_kv_heads, group, num_rows, head_dim),
        key[0][:, None].expand(-1, group, -1, -1),
        value[0][:, None].expand(-1, group, -1, -1),
        attn_mask=mask,
        is_causal=is_causal,
        scale=options.scaling,
    )
    return attended.reshape(1, num_heads, num_rows, value.shape[3])


def head_views(
    layer: LayerKV, slot: int, first: int, end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of tokens [first, end) as [1, num_kv_heads, end - first, ...]: not copied, unless
    they are quantised."""
    k, v = layer.k[slot, first:end], layer.v[slot, first:end]
    if layer.format is not None:
        k, v = layer.format.dequantise_keys(k), layer.format.dequantise(v)
    return k.transpose(0, 1)[None], v.transpose(0, 1)[None]


def make_band(
    width: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """[QUERY_BLOCK, width] of 0 and -inf: row i sees columns (i + zero - window, i + zero].

    zero = width - QUERY_BLOCK.
    """
    row = torch.arange(QUERY_BLOCK, device=device)[:, None] + (width - QUERY_BLOCK)
    column = torch.arange(width, device=device)[None, :]
    hidden = column > row
    if window is not None:
        hidden |= column <= row - window
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


def hide_other_chunks(mask: torch.Tensor, start: int, first: int, chunk: int) -> torch.Tensor:
    """`mask`, of query rows from `start` and keys from `first` on, less what is in other chunks."""
    rows = torch.arange(start, start + mask.shape[0], device=mask.device)[:, None] // chunk
    keys = torch.arange(first, first + mask.shape[1], device=mask.device)[None, :] // chunk
    return mask.masked_fill(rows != keys, -torch.inf)


def exact_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    options: AttentionOptions,
) -> torch.Tensor:
    """Attention written out, for soft-capped scores and sinks, which no fused CPU kernel has.

    query: [1, num_heads, rows, key_dim]; key, value: [1, num_kv_heads, keys, key_dim or value_dim];
    mask: [rows, keys]. Returns [1, num_heads, rows, value_dim].
    """
    _, num_heads, num_rows, head_dim = query.shape
    num_kv_heads = key.shape[1]
    scaling = head_dim**-0.5 if options.scaling is None else options.scaling
    q = query[0].reshape(num_kv_heads, -1, num_rows, head_dim)
    scores = torch.matmul(q, key[0].transpose(1, 2)[:, None]) * scaling
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = scores + mask
    if options.sinks is not None:
        sinks = options.sinks.to(scores.dtype).view(num_kv_heads, -1, 1, 1)
        scores = torch.cat([scores, sinks.expand(-1, -1, num_rows, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)[..., : key.shape[2]]
    attended = torch.matmul(weights.to(value.dtype), value[0][:, None])
    return attended.reshape(1, num_heads, num_rows, value.shape[3])
