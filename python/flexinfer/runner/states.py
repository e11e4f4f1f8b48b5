"""StepStates: the recurrent states of a step, from the arena through the mixers and back.

    before   the states of the segments are copied out of the arena, those of all decodes together
    during   each mixer is called part by part; the copies become the states behind its tokens
    after    they are written, once tokens have been sampled

A plan that fails on the way has written nothing, and may be executed again. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from flexinfer.attention.segments import Segment
from flexinfer.models.mixers import (
    Forward,
    Mixer,
    find_mixers,
    new_cache,
    put_state,
    running_mixers,
    take_state,
)
from flexinfer.runtime.transfer import to_device

if TYPE_CHECKING:
    from flexinfer.models.describe import LoadedModel
    from flexinfer.vtensor import VTensorManager


@dataclass(frozen=True, slots=True)
class Part:
    """Sequences that go through the mixers together: equally many tokens, all with a state or all
    without."""

    rows: slice | torch.Tensor
    """Of the flat batch: one sequence after the other."""
    num_seqs: int
    read: torch.Tensor | None
    """[num_seqs] slots; None: nothing is before these tokens."""
    written: torch.Tensor
    """[num_seqs] slots."""
    cache: Any
    """Holds the copies."""


class StepStates:
    """The states of one model in one arena."""

    def __init__(self, loaded: LoadedModel, manager: VTensorManager) -> None:
        self.layout = layout = manager.spec.state
        self._device = loaded.device
        self._mixers = find_mixers(loaded.model) if layout.tensors else []
        self._num_layers = 1 + max((tensor.layer for tensor in layout.tensors), default=-1)
        self._arenas = {
            tensor: _arena(manager, tensor, place)
            for tensor, place in zip(layout.tensors, layout.places, strict=True)
        }
        self._parts: list[Part] = []

    def read(self, segments: Sequence[Segment], slots: Sequence[tuple[int, int]]) -> None:
        """Copy the states of a step's segments; `slots`: (read, written) of each. Without slots,
        as for padding, the mixers compute nothing."""
        self._parts = []
        if not slots:
            return
        decodes = []
        for segment, (read, written) in zip(segments, slots, strict=True):
            if read >= 0 and segment.num_tokens == 1:
                decodes.append((segment.row, read, written))
                continue
            rows = slice(segment.row, segment.row + segment.num_tokens)
            self._add(rows, [read] if read >= 0 else None, [written])
        if decodes:
            first, last = decodes[0][0], decodes[-1][0]
            is_run = last - first + 1 == len(decodes)
            rows_of = [row for row, _, _ in decodes]
            together = slice(first, last + 1) if is_run else self._to_device(rows_of)
            self._add(together, [read for _, read, _ in decodes], [w for _, _, w in decodes])

    def in_force(self) -> AbstractContextManager[None]:
        """Within this context the model computes the segments of the last `read`."""
        return running_mixers(self._mixers, self._run)

    def write(self) -> None:
        """Put the states that the last forward has left where its plan says."""
        for part in self._parts:
            for tensor, arena in self._arenas.items():
                left = take_state(part.cache, tensor)
                arena.index_copy_(0, part.written, left.to(arena.dtype))
        self._parts = []

    def _add(self, rows: slice | torch.Tensor, read: list[int] | None, written: list[int]) -> None:
        cache = new_cache(self._num_layers)
        slots = None if read is None else self._to_device(read)
        for tensor, arena in self._arenas.items():
            if slots is None:
                values = arena.new_zeros((len(written), *tensor.shape))
            else:
                values = arena.index_select(0, slots)
            put_state(cache, tensor, values, is_fresh=slots is None)
        self._parts.append(Part(rows, len(written), slots, self._to_device(written), cache))

    def _run(
        self, mixer: Mixer, forward: Forward, hidden_states: torch.Tensor, others: dict[str, Any]
    ) -> torch.Tensor:
        """`RunMixer`: what else the model passes has been looked at in the probe."""
        output = torch.zeros_like(hidden_states)
        for part in self._parts:
            given = hidden_states[0, part.rows].view(part.num_seqs, -1, hidden_states.shape[-1])
            one_by_one = part.read is not None and not mixer.goes_on
            tokens = torch.split(given, 1, dim=1) if one_by_one else (given,)
            result = torch.cat([mixer.call(forward, some, part.cache) for some in tokens], dim=1)
            output[0, part.rows] = result.flatten(0, 1)
        return output

    def _to_device(self, numbers: list[int]) -> torch.Tensor:
        return to_device(numbers, torch.int64, self._device)


def _arena(manager: VTensorManager, tensor: Any, place: Any) -> torch.Tensor:
    """[slots, *shape], zero-copy: where a tensor of the state lies in each slot."""
    plane: torch.Tensor = getattr(manager, place.plane.which)(place.plane.layer)
    slot_bytes = plane.stride(0) * plane.element_size()
    raw = plane.view(torch.uint8)
    offset = raw.storage_offset() + place.offset_bytes
    raw = raw.as_strided((len(plane), tensor.num_bytes), (slot_bytes, 1), offset)
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    values = raw.view(dtype)
    return values.view(len(values), *tensor.shape)
