"""TorchFlash: the flash attention kernel that torch itself ships, on the arena.

The kernel takes one long list of rows and where each request starts in it. The arena is such a list
without copying, as long as a slot is a whole number of token strides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flexinfer.attention.base import AttentionMetadata, LayerKV, store_decodes
from flexinfer.attention.flash_kernels import (
    SLICE_TOKENS,
    DecodeKernel,
    DecodeStep,
    PrefillKernel,
    Scores,
    round_up,
)


class TorchFlash(DecodeKernel, PrefillKernel):
    """The FlashAttention 2 that torch itself ships, by `aten::_flash_attention_forward`: its public
    face, torch.nn.attention.varlen, changes from version to version.

    The arena becomes one long list of rows; a request starts at row slot x rows_per_slot, and
    `seqused_k` says how many rows it has. REQUIRES: a slot is a whole number of token strides.
    """

    name = "torch's FlashAttention 2"
    has_softcap = False

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._forward = function or torch.ops.aten._flash_attention_forward.default
        self._starts: tuple[DecodeStep, int, torch.Tensor, torch.Tensor] | None = None

    def decode(
        self,
        layer: LayerKV,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        step: DecodeStep,
        scores: Scores,
    ) -> torch.Tensor:
        store_decodes(layer, key, value, metadata)
        each, starts = self._starts_of(step, count_rows_per_slot(layer.k))
        shown = round_up(step.max_end, SLICE_TOKENS)
        return self._call(
            query, flat_rows(layer.k), flat_rows(layer.v), each, starts, 1, shown, scores, step.ends
        )

    def _starts_of(self, step: DecodeStep, rows_per_slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[num_decodes + 1] int32 each: where requests start among the queries and in the arena.
        Made once per step: it is the same for all layers."""
        known = self._starts
        if known is None or known[0] is not step or known[1] != rows_per_slot:
            num_decodes = step.slots.shape[0]
            starts = step.slots.new_zeros(num_decodes + 1)  # the last is no request's, and not read
            torch.mul(step.slots, rows_per_slot, out=starts[:num_decodes])
            each = torch.arange(num_decodes + 1, dtype=torch.int32, device=step.slots.device)
            known = self._starts = (step, rows_per_slot, each, starts)
        return known[2:]

    def fresh(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_len: int,
        scores: Scores,
    ) -> torch.Tensor:
        return self._call(query, key, value, cu_seqlens, cu_seqlens, max_len, max_len, scores, None)

    def prefixed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        output: torch.Tensor = self._forward(
            query[None],
            key[None],
            value[None],
            None,
            None,
            query.shape[0],
            key.shape[0],
            0.0,
            True,
            False,
            scale=scores.scaling,
            **window_arguments(scores),
        )[0]
        return output[0]

    def _call(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_q: int,
        max_k: int,
        scores: Scores,
        seqused_k: torch.Tensor | None,
    ) -> torch.Tensor:
        output: torch.Tensor = self._forward(
            query,
            key,
            value,
            cu_seqlens_q,
            cu_seqlens_k,
            max_q,
            max_k,
            0.0,
            True,
            False,
            scale=scores.scaling,
            seqused_k=seqused_k,
            **window_arguments(scores),
        )[0]
        return output


def window_arguments(scores: Scores) -> dict[str, int]:
    """None, not -1, where there is no window: that is torch's own default."""
    if scores.window == (-1, -1):
        return {}
    return {"window_size_left": scores.window[0], "window_size_right": scores.window[1]}


def count_rows_per_slot(arena: torch.Tensor) -> int:
    """Token strides from one slot to the next; 0 if they do not fit, or int32 could not count them.

    arena: [slots, tokens, heads, dim].
    """
    slot_stride, token_stride = arena.stride()[:2]
    rows, rest = divmod(slot_stride, token_stride)
    return 0 if rest or rows * arena.shape[0] >= 2**31 else rows


def flat_rows(arena: torch.Tensor) -> torch.Tensor:
    """[slots, tokens, heads, dim] -> [rows, heads, dim], not copied; row = slot x rows_per_slot +
    token. Rows between the slots' ends and the next slots' starts are never to be read."""
    num_slots, num_tokens, num_heads, head_dim = arena.shape
    _, token_stride, head_stride, dim_stride = arena.stride()
    num_rows = (num_slots - 1) * count_rows_per_slot(arena) + num_tokens
    return arena.as_strided(
        (num_rows, num_heads, head_dim), (token_stride, head_stride, dim_stride)
    )
