"""The calls of two-phase attention by flash-attn's `flash_attn_with_kvcache`, on the arena.

It returns log-sum-exp, splits long ranges over the device, and takes the suffixes of many requests
in one call: those that start at the same token, since the cache is then the arena from there on.
The function is given, so that tests can put a reference in its place.

Only FlashAttention 2's will do: a range is followed by addresses with nothing behind them, see
flash_kernels.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flexinfer.attention.base import LayerKV
from flexinfer.attention.segments import SharedRange
from flexinfer.attention.sharing_cost import SharingCost
from flexinfer.attention.two_phase import Rows, TwoPhasePlan, index_rows
from flexinfer.runtime.transfer import to_device

# What a shared range saves and costs on a GPU. ESTIMATES for an H100-class device, not measured:
# docs/two_phase.md. Each is on the side of not sharing.
CUDA_BYTES_PER_US = 5e6
"""5 TB/s, about the rate of an H100's L2: repeated reads of a short range hit it, as shared chunks
are one memory. From HBM (3.35 TB/s on an H100, 4.8 on an H200) a read that is saved is worth more,
and on smaller devices."""
CUDA_CALL_US = 250.0
"""Some 25 launches of 10 us from Python: gathering, the call, merging, and the range's suffixes."""
CUDA_MERGE_US = 0.2
"""Ten passes over a query's partial result in float32 (16 KiB with 32 heads of 128)."""


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
        # The query heads of a KV head are rows, so that K and V are read once for all of them.
        num_members, num_heads, head_dim = query.shape
        num_kv_heads = layer.k.shape[2]
        group = num_heads // num_kv_heads
        rows = query.reshape(num_members, num_kv_heads, group, head_dim).transpose(1, 2)
        output, lse = self._attend(
            rows.reshape(1, num_members * group, num_kv_heads, head_dim),
            k_cache=layer.k[shared.slot : shared.slot + 1, shared.start : shared.end],
            v_cache=layer.v[shared.slot : shared.slot + 1, shared.start : shared.end],
            cache_seqlens=shared.end - shared.start,
            softmax_scale=scaling,
            causal=False,
            return_softmax_lse=True,
        )
        output = output.view(num_members, group, num_kv_heads, head_dim).transpose(1, 2)
        lse = lse.view(num_kv_heads, num_members, group).transpose(0, 1)
        return output.flatten(1, 2), lse.flatten(1, 2)

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
    some member's last one. Made once per step."""
    by_start: dict[int, list[int]] = defaultdict(list)
    for position, start in enumerate(plan.covered):
        by_start[start].append(position)
    groups = []
    for start, positions in by_start.items():
        decodes = [plan.decodes[position] for position in positions]
        groups.append(
            SuffixGroup(
                start,
                max(s.end for s in decodes),
                index_rows([s.row for s in decodes], device),
                index_rows(positions, device),
                to_device([s.slot for s in decodes], torch.int32, device),
                to_device([s.end - start for s in decodes], torch.int32, device),
            )
        )
    return groups


def cuda_cost(layer: LayerKV) -> SharingCost:
    """Of two phases in a step that is launched kernel by kernel."""
    _, _, num_kv_heads, head_dim = layer.k.shape
    return SharingCost(
        token_bytes=2 * num_kv_heads * head_dim * layer.k.element_size(),
        bytes_per_us=CUDA_BYTES_PER_US,
        call_us=CUDA_CALL_US,
        merge_us=CUDA_MERGE_US,
    )
