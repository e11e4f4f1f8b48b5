"""The calls of two-phase attention by flash-attn's `flash_attn_with_kvcache`, on the arena.

It returns log-sum-exp, splits long ranges over the device, and takes the suffixes of many requests
in one call: those that start at the same token, since the cache is then the arena from there on.
The function is given, so that tests can put a reference in its place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flexinfer.attention.base import LayerKV, SharedRange
from flexinfer.attention.two_phase import Rows, TwoPhasePlan, index_rows


@dataclass(frozen=True, slots=True)
class SuffixGroup:
    """Decodes whose suffixes start at the same token."""

    start: int
    max_end: int
    rows: Rows
    """In the flat batch."""
    positions: Rows
    """Among the plan's decodes."""
    slots: torch.Tensor
    """[n] int32, on the device."""
    lengths: torch.Tensor
    """[n] int32, on the device: tokens from `start` to each end."""


class FlashPartial:
    """REQUIRES: FlashAttention 2's function; an arena in float16 or bfloat16. Not thread-safe."""

    def __init__(self, flash_attn_with_kvcache: Callable[..., Any]) -> None:
        self._attend = flash_attn_with_kvcache
        self._plan: TwoPhasePlan | None = None
        self._groups: list[SuffixGroup] = []

    def shared(
        self, layer: LayerKV, shared: SharedRange, query: torch.Tensor, scaling: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output, lse = self._attend(
            query[None],
            k_cache=layer.k[shared.slot : shared.slot + 1, shared.start : shared.end],
            v_cache=layer.v[shared.slot : shared.slot + 1, shared.start : shared.end],
            cache_seqlens=shared.end - shared.start,
            softmax_scale=scaling,
            causal=False,
            return_softmax_lse=True,
        )
        return output[0], lse[0].transpose(0, 1)

    def suffixes(
        self, layer: LayerKV, plan: TwoPhasePlan, query: torch.Tensor, scaling: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if plan is not self._plan:
            self._plan, self._groups = plan, suffix_groups(plan, query.device)
        output = query.new_empty(len(plan.decodes), *query.shape[1:])
        lse = torch.empty(output.shape[:2], dtype=torch.float32, device=query.device)
        for group in self._groups:
            part, part_lse = self._attend(
                query[group.rows][:, None],
                k_cache=layer.k[:, group.start : group.max_end],
                v_cache=layer.v[:, group.start : group.max_end],
                cache_seqlens=group.lengths,
                cache_batch_idx=group.slots,
                softmax_scale=scaling,
                causal=False,
                return_softmax_lse=True,
            )
            output[group.positions] = part[:, 0]
            lse[group.positions] = part_lse[:, :, 0]
        return output, lse


def suffix_groups(plan: TwoPhasePlan, device: torch.device) -> list[SuffixGroup]:
    """The plan's decodes by the first token of their suffixes: one group a chosen range that is
    some member's last one. Made once a step."""
    by_start: dict[int, list[int]] = defaultdict(list)
    for position, start in enumerate(plan.covered):
        by_start[start].append(position)
    groups = []
    for start, positions in by_start.items():
        decodes = [plan.decodes[position] for position in positions]
        numbers = torch.tensor(
            [[s.slot for s in decodes], [s.end - start for s in decodes]], dtype=torch.int32
        ).to(device)
        groups.append(
            SuffixGroup(
                start,
                max(s.end for s in decodes),
                index_rows([s.row for s in decodes], device),
                index_rows(positions, device),
                numbers[0],
                numbers[1],
            )
        )
    return groups
