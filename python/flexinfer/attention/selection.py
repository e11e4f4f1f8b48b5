"""Attention to chosen tokens: each query sees those that an index has selected, and no others.

By torch, request by request: a decode gathers what it sees, a prefill masks the rest.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from flexinfer.attention.base import AttentionMetadata, AttentionOptions, LayerKV, store_kv
from flexinfer.attention.sdpa import QUERY_BLOCK, exact_attention, grouped_sdpa, head_views
from flexinfer.attention.segments import Segment


def attend_selected(
    layer: LayerKV,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: AttentionOptions,
    selected: torch.Tensor,
    metadata: AttentionMetadata,
) -> torch.Tensor:
    """As `AttentionBackend.forward`, but a token sees only those of `selected` up to itself.

    selected: [num_tokens, n] integers, positions in each token's own request; -1: none.
    """
    store_kv(layer, key, value, metadata)
    num_heads, num_tokens, _ = query.shape
    output = query.new_zeros(num_tokens, num_heads, layer.v.shape[3])
    is_plain = options.softcap is None and options.sinks is None
    for i, s in enumerate(metadata.segments):
        if i < metadata.num_decodes and is_plain:
            _decode(layer, query, output, s, options, selected[s.row])
            continue
        for start in range(s.start, s.end, QUERY_BLOCK):
            end = min(start + QUERY_BLOCK, s.end)
            rows = slice(s.row + start - s.start, s.row + end - s.start)
            k, v = head_views(layer, s.slot, 0, end)
            mask = selection_mask(selected[rows], start, s.end, query.dtype)[:, :end]
            attend = grouped_sdpa if is_plain else _exact
            output[rows] = attend(query[None, :, rows], k, v, options, mask)[0].transpose(0, 1)
    return output


def selection_mask(
    selected: torch.Tensor, start: int, num_keys: int, dtype: torch.dtype
) -> torch.Tensor:
    """[rows, num_keys] of 0 and -inf; row i is token start + i. selected: [rows, n], below
    num_keys."""
    num_rows = selected.shape[0]
    is_hidden = selected.new_ones((num_rows, num_keys + 1), dtype=torch.bool)
    is_hidden.scatter_(1, selected.long() + 1, False)
    row = torch.arange(start, start + num_rows, device=selected.device)[:, None]
    is_hidden = is_hidden[:, 1:] | (torch.arange(num_keys, device=selected.device)[None] > row)
    zeros = torch.zeros(is_hidden.shape, dtype=dtype, device=selected.device)
    return zeros.masked_fill_(is_hidden, -torch.inf)


def _exact(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: AttentionOptions,
    mask: torch.Tensor,
) -> torch.Tensor:
    return exact_attention(query, key, value, mask, options)


def _decode(
    layer: LayerKV,
    query: torch.Tensor,
    output: torch.Tensor,
    s: Segment,
    options: AttentionOptions,
    selected: torch.Tensor,
) -> None:
    """One token: it reads what it sees, and nothing else."""
    where = selected[selected >= 0].long()
    k = layer.k[s.slot].index_select(0, where).transpose(0, 1)[None]
    v = layer.v[s.slot].index_select(0, where).transpose(0, 1)[None]
    num_heads, _, key_dim = query.shape
    grouped = query[:, s.row].reshape(1, k.shape[1], num_heads // k.shape[1], key_dim)
    attended = scaled_dot_product_attention(grouped, k, v, scale=options.scaling)
    output[s.row] = attended.reshape(num_heads, v.shape[3])
