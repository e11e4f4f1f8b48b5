"""StepInputs: a step's flat batch as tensors, and the builder that fills them.

    decodes (one token each)      prefills (chunks of any length)
    | r0 | r1 | r2 | ... |        |    r7    |       r8        | ...

    | padding: no request's rows, where the model is compiled for each number of rows anew

All integers of a step are written into one buffer of the host, pinned if the device is a GPU, and
reach the device in one copy. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from flexinfer.attention.base import AttentionMetadata
from flexinfer.attention.segments import Segment, SharedRange
from flexinfer.attention.sharing_cost import SharingCost, choose_ranges
from flexinfer.layers.adapters import AdapterSpan, StepAdapters
from flexinfer.runner.plan import StepPlan


@dataclass(frozen=True, slots=True)
class StepInputs:
    """All tensors are int64 on the model's device, and views of a buffer that the next step
    overwrites."""

    token_ids: torch.Tensor
    """[num_rows]: those of the batch, and padding"""
    positions: torch.Tensor
    """[num_rows]"""
    logits_rows: torch.Tensor
    """Rows of the batch whose logits are needed: those that sample, then those that score."""
    metadata: AttentionMetadata
    adapters: StepAdapters | None = None
    """None: no row has an adapter."""


def padded_count(count: int) -> int:
    """The next of 0, 1, 2, 4 and the multiples of 8; from 256 on of 16 in each power of two, which
    is at most 6 % more."""
    if count <= 4:
        return count if count < 3 else 4
    step = max(8, (1 << (count - 1).bit_length()) >> 5)
    return -(-count // step) * step


class InputBuilder:
    """Turns plans into tensors, without a Python loop over tokens."""

    def __init__(
        self,
        device: torch.device,
        sharing_cost: SharingCost | None = None,
        *,
        pads_rows: bool = False,
    ) -> None:
        """sharing_cost: the backend's; without it no range is shared. pads_rows: batches have a
        `padded_count` of rows, and so have the rows whose logits are needed."""
        self._device = device
        self.pads_rows = pads_rows
        self._count: Callable[[int], int] = padded_count if pads_rows else int
        self._sharing_cost = sharing_cost
        self._host = self._new_host(1024)
        self._copied: torch.cuda.Event | None = None

    def count_rows(self, plan: StepPlan) -> tuple[int, int]:
        """How many rows `build` makes of a plan: tokens, and those whose logits are needed."""
        num_tokens = len(plan.token_ids) // 4
        num_logits = len(plan.sampled_rows) + sum(s.end - s.start for s in plan.scored)
        return self._count(num_tokens), self._count(num_logits)

    def build(self, plan: StepPlan) -> StepInputs:
        segments = flat_segments(plan)
        token_ids = np.frombuffer(plan.token_ids, np.int32)
        num_tokens, num_decodes = len(token_ids), plan.num_decodes
        rows = list(plan.sampled_rows)
        for scored in plan.scored:
            rows += range(scored.row, scored.row + scored.end - scored.start)
        num_rows, num_logits = self.count_rows(plan)
        rows += [0] * (num_logits - len(rows))
        host = self._host_buffer(2 * num_rows + num_decodes + len(rows))
        ids, positions, slots, logits_rows = _split(host, num_rows, num_decodes, len(rows))
        ids[:num_tokens] = token_ids
        ids[num_tokens:] = 0
        positions[:num_decodes] = plan.starts[:num_decodes]
        positions[num_tokens:] = 0
        slots[:] = plan.slots[:num_decodes]
        logits_rows[:] = rows
        for s in segments[num_decodes:]:
            positions[s.row : s.row + s.num_tokens] = np.arange(s.start, s.end)
        parts = _split(self._to_device(len(host)), num_rows, num_decodes, len(rows))
        return StepInputs(
            token_ids=parts[0],
            positions=parts[1],
            logits_rows=parts[3],
            adapters=step_adapters(plan, segments, num_rows),
            metadata=AttentionMetadata(
                segments=segments,
                num_decodes=num_decodes,
                decode_slots=parts[2],
                decode_positions=parts[1][:num_decodes],
                shared=self._shared(plan, segments),
                num_padding=num_rows - num_tokens,
            ),
        )

    def build_padding(self, num_rows: int, num_logits: int) -> StepInputs:
        """Rows that belong to no request; parts of one tensor, as those of a step, since compiled
        models are only for what is so."""
        zeros = torch.zeros(2 * num_rows + num_logits, dtype=torch.int64, device=self._device)
        token_ids, positions, _, logits_rows = _split(zeros, num_rows, 0, num_logits)
        metadata = AttentionMetadata.build([], self._device)
        metadata = replace(metadata, num_padding=num_rows)
        return StepInputs(token_ids, positions, logits_rows, metadata)

    def build_prompt(self, slot: int, num_tokens: int) -> StepInputs:
        """A prompt of zeros whose last logits are computed, for no request at all."""
        positions = torch.arange(num_tokens, device=self._device)
        return StepInputs(
            token_ids=torch.zeros_like(positions),
            positions=positions,
            logits_rows=positions[-1:],
            metadata=AttentionMetadata.build([Segment(slot, 0, 0, num_tokens)], self._device),
        )

    def _shared(self, plan: StepPlan, segments: Sequence[Segment]) -> list[SharedRange]:
        """What is worth computing once, of the KV that segments share before their new tokens."""
        if self._sharing_cost is None or not plan.shared:
            return []
        return choose_ranges([SharedRange(*s) for s in plan.shared], segments, self._sharing_cost)

    def _host_buffer(self, size: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The first `size` entries of the host's buffer, once the device has read the last step."""
        if self._copied is not None:
            self._copied.synchronize()
        if len(self._host) < size:
            self._host = self._new_host(2 * size)
        return self._host.numpy()[:size]

    def _new_host(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int64, pin_memory=self._device.type == "cuda")

    def _to_device(self, size: int) -> torch.Tensor:
        if self._device.type == "cpu":
            return self._host[:size]
        on_device = self._host[:size].to(self._device, non_blocking=True)
        if self._device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        return on_device


def flat_segments(plan: StepPlan) -> list[Segment]:
    """Where each segment's tokens stand in the flat batch."""
    segments = []
    row = 0
    for slot, start, end in zip(plan.slots, plan.starts, plan.ends, strict=True):
        segments.append(Segment(slot, row, start, end))
        row += end - start
    return segments


def step_adapters(
    plan: StepPlan, segments: Sequence[Segment], num_rows: int
) -> StepAdapters | None:
    """The adapters of a batch of `num_rows`; segments of one that are neighbours are one span."""
    if not plan.adapters:
        return None
    spans: list[AdapterSpan] = []
    for number, of_adapter in groupby(zip(plan.adapters, segments, strict=True), itemgetter(0)):
        rows = [segment for _, segment in of_adapter]
        if number:
            spans.append(AdapterSpan(number, rows[0].row, rows[-1].row + rows[-1].num_tokens))
    return StepAdapters(num_rows, tuple(spans))


def _split(buffer: Any, num_tokens: int, num_decodes: int, num_rows: int) -> tuple[Any, ...]:
    """Views: token ids, positions, slots of the decodes, rows whose logits are needed."""
    ends = np.cumsum([num_tokens, num_tokens, num_decodes, num_rows]).tolist()
    starts = [0, *ends[:-1]]
    return tuple(buffer[start:end] for start, end in zip(starts, ends, strict=True))
