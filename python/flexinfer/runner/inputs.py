"""StepInputs: a step's flat batch as tensors, and the builder that fills them.

    decodes (one token each)      prefills (chunks of any length)
    | r0 | r1 | r2 | ... |        |    r7    |       r8        | ...

All integers of a step are written into one buffer of the host, pinned if the device is a GPU, and
reach the device in one copy. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from flexinfer.attention.base import AttentionMetadata, Segment, SharedRange
from flexinfer.attention.sharing_cost import SharingCost, choose_ranges
from flexinfer.scheduler.batch import ScheduledRequest
from flexinfer.scheduler.request import Request

if TYPE_CHECKING:
    from flexinfer.vtensor import VTensor

FindShared = Callable[
    [Sequence["VTensor"], Sequence[int]], list[tuple[int, int, int, tuple[int, ...]]]
]


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Prompt positions whose logits tell the log probabilities of the tokens after them."""

    request: Request
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class StepInputs:
    """All tensors are int64 on the model's device, and views of a buffer that the next step
    overwrites."""

    token_ids: torch.Tensor
    """[num_tokens]"""
    positions: torch.Tensor
    """[num_tokens]"""
    sampled_rows: torch.Tensor
    """[number of requests that sample + scored rows]: rows of the batch whose logits are needed."""
    requests: list[Request]
    """Which request samples from each of the first; forks of one prompt from the same row."""
    metadata: AttentionMetadata
    scored: list[ScoredRows] = field(default_factory=list)
    """Whose prompt tokens are scored by the sampled rows after those of `requests`."""


class InputBuilder:
    """Turns scheduled requests into tensors, without a Python loop over tokens."""

    def __init__(
        self,
        device: torch.device,
        find_shared: FindShared | None = None,
        sharing_cost: SharingCost | None = None,
    ) -> None:
        """find_shared: `VTensorManager.shared_ranges`; sharing_cost: the backend's. Without one of
        them no range is shared."""
        self._device = device
        self._find_shared = find_shared
        self._sharing_cost = sharing_cost
        self._host = self._new_host(1024)
        self._copied: torch.cuda.Event | None = None

    def build(self, items: Sequence[ScheduledRequest]) -> StepInputs:
        """The batch of `items`, one-token items first. REQUIRES: they have vTensors."""
        items = sorted(items, key=lambda item: item.num_tokens > 1)
        segments = flat_segments(items)
        num_tokens = segments[-1].row + segments[-1].num_tokens if segments else 0
        num_decodes = sum(segment.num_tokens == 1 for segment in segments)
        rows, requests = _samples(items, segments)
        scored = _score_rows(items, segments, rows)
        host = self._host_buffer(2 * num_tokens + num_decodes + len(rows))
        ids, positions, slots, sampled = _split(host, num_tokens, num_decodes, len(rows))
        ids[:num_decodes] = [i.request.token_ids[i.start] for i in items[:num_decodes]]
        positions[:num_decodes] = [segment.start for segment in segments[:num_decodes]]
        slots[:] = [segment.slot for segment in segments[:num_decodes]]
        sampled[:] = rows
        for item, s in zip(items[num_decodes:], segments[num_decodes:], strict=True):
            end = s.row + s.num_tokens
            ids[s.row : end] = np.frombuffer(item.request.token_array, np.intc)[s.start : s.end]
            positions[s.row : end] = np.arange(s.start, s.end)
        parts = _split(self._to_device(len(host)), num_tokens, num_decodes, len(rows))
        return StepInputs(
            token_ids=parts[0],
            positions=parts[1],
            sampled_rows=parts[3],
            requests=requests,
            scored=scored,
            metadata=AttentionMetadata(
                segments=segments,
                num_decodes=num_decodes,
                decode_slots=parts[2],
                decode_positions=parts[1][:num_decodes],
                shared=self._shared(items, segments),
            ),
        )

    def build_prompt(self, slot: int, num_tokens: int) -> StepInputs:
        """A prompt of zeros that samples from its last token, for no request at all."""
        positions = torch.arange(num_tokens, device=self._device)
        return StepInputs(
            token_ids=torch.zeros_like(positions),
            positions=positions,
            sampled_rows=positions[-1:],
            requests=[],
            metadata=AttentionMetadata.build([Segment(slot, 0, 0, num_tokens)], self._device),
        )

    def _shared(
        self, items: Sequence[ScheduledRequest], segments: Sequence[Segment]
    ) -> list[SharedRange]:
        """What is worth computing once, of the KV that items share before their new tokens."""
        if self._find_shared is None or self._sharing_cost is None:
            return []
        found = self._find_shared([i.vtensor for i in items], [i.start for i in items])
        return choose_ranges([SharedRange(*f) for f in found], segments, self._sharing_cost)

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


def flat_segments(items: Sequence[ScheduledRequest]) -> list[Segment]:
    """Where each item's tokens stand in the flat batch."""
    segments = []
    row = 0
    for item in items:
        segments.append(Segment(item.vtensor.slot, row, item.start, item.end))
        row += item.num_tokens
    return segments


def _samples(
    items: Sequence[ScheduledRequest], segments: Sequence[Segment]
) -> tuple[list[int], list[Request]]:
    """The batch's row and the request of each token to sample."""
    rows: list[int] = []
    requests: list[Request] = []
    for item, segment in zip(items, segments, strict=True):
        if item.samples:
            row = segment.row + segment.num_tokens - 1
            rows += [row] * (1 + len(item.request.siblings))
            requests += (item.request, *item.request.siblings)
    return rows, requests


def _score_rows(
    items: Sequence[ScheduledRequest], segments: Sequence[Segment], rows: list[int]
) -> list[ScoredRows]:
    """Adds to `rows` those that score prompts, for requests that want that."""
    scored = []
    for item, segment in zip(items, segments, strict=True):
        request = item.request
        if request.params.prompt_logprobs is None:
            continue
        start = max(item.start, len(request.scored))
        end = min(item.end, len(request.prompt_token_ids) - 1)
        if start < end:
            rows += range(segment.row + start - item.start, segment.row + end - item.start)
            scored.append(ScoredRows(request, start, end))
    return scored


def _split(buffer: Any, num_tokens: int, num_decodes: int, num_samples: int) -> tuple[Any, ...]:
    """Views: token ids, positions, slots of the decodes, sampled rows."""
    ends = np.cumsum([num_tokens, num_tokens, num_decodes, num_samples]).tolist()
    starts = [0, *ends[:-1]]
    return tuple(buffer[start:end] for start, end in zip(starts, ends, strict=True))
