"""OpenCore: what a manager and its vTensors share of the C++ core: its lifetime, growing within a
shortage, tensor views, and looking at it.

Thread-safety: all of it may be called from any thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from flexinfer import _vtensor
from flexinfer._vtensor import Stats
from flexinfer.errors import OutOfMemoryError
from flexinfer.vtensor.arguments import bad_lengths, check_layer
from flexinfer.vtensor.block_events import BlockEvent
from flexinfer.vtensor.spec import KVSpec


class OpenCore:
    """The part of :class:`VTensorManager` that knows no :class:`VTensor`, only their ids."""

    spec: KVSpec
    chunk_bytes: int
    max_requests: int
    on_shortage: Callable[[], bool] | None = None
    """Called when the system refuses memory that the budget allows, as where another allocator of
    the device holds it; if it got some back (True), the call is tried once more."""
    _core: _vtensor.Manager
    _closed = True  # until it is open
    _from_dlpack: Callable[[Any], Any]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has been called."""
        return self._closed

    def close(self) -> None:
        """Release every vTensor and give all memory that no view needs back to the system."""
        self._closed = True
        self._core.close()

    def _no_slot(self) -> OutOfMemoryError:
        stats = self.stats()
        broken = stats.num_broken_slots
        because = f", and the driver cannot unmap {broken} that failed before" if broken else ""
        error = OutOfMemoryError(
            f"all {self.max_requests - broken} slots hold live requests{because}; "
            "release one or raise max_requests"
        )
        sizes = {"asked_bytes": 0, "free_bytes": stats.available_bytes}
        vars(error).update(sizes, budget_bytes=stats.budget_bytes)
        return error

    def extend_ids(self, ids: Sequence[int], num_tokens: Sequence[int]) -> None:
        """Extend the vTensors of these ids, all or none. Raises OutOfMemoryError."""
        try:
            self._core.extend(ids, num_tokens)
        except OutOfMemoryError:
            if not self._got_memory_back():
                raise
            self._core.extend(ids, num_tokens)
        except TypeError:
            raise bad_lengths(num_tokens) from None

    def try_extend_ids(self, ids: Sequence[int], num_tokens: Sequence[int]) -> bool:
        """As :meth:`extend_ids`; False, with nothing changed, when memory is short."""
        try:
            return self._core.try_extend(ids, num_tokens) or (
                self._got_memory_back() and self._core.try_extend(ids, num_tokens)
            )
        except TypeError:  # checked afterwards: a decode step of many requests pays for it
            raise bad_lengths(num_tokens) from None

    def forget_ids(self, ids: Sequence[int], num_tokens: Sequence[int]) -> None:
        """As :meth:`VTensorManager.forget`, by ids: what a scheduler of many requests calls after
        each step. Those of vTensors that have been released are passed over."""
        try:
            self._core.forget(ids, num_tokens)
        except TypeError:
            raise bad_lengths(num_tokens) from None

    def _got_memory_back(self) -> bool:
        """After a shortage: whether :attr:`on_shortage` has found something that the budget allows
        to be taken. Not asked where the budget itself is used up."""
        if self.on_shortage is None:
            return False
        row_bytes = self.chunk_bytes * self.spec.row_chunks
        if self._core.resident_bytes() + row_bytes > self._core.memory_budget():
            return False
        return self.on_shortage()

    # ---------------------------------------------------------------------------------- views

    def k(self, layer: int) -> Any:
        """Keys of ``layer`` in all slots, zero-copy, strided:
        ``[max_requests, max_seq_len, num_kv_heads, key_dim]``, first index ``vtensor.slot``.

        Only tokens below a vTensor's extended length may be written; beyond it `unmapped`
        holds.
        """
        return self._arena(layer, _vtensor.KV.KEY)

    def v(self, layer: int) -> Any:
        """Values of ``layer`` in all slots; see :meth:`k`."""
        return self._arena(layer, _vtensor.KV.VALUE)

    def _arena(self, layer: int, which: _vtensor.KV) -> Any:
        dtype = self.spec.group_of(check_layer(layer)).dtype
        return self._from_dlpack(self._core.arena(layer, which, dtype))

    # ----------------------------------------------------------------------- recorded blocks

    def watch_blocks(self) -> None:
        """Keep a log of the blocks of 16 tokens that are recorded and forgotten from now on, for
        :meth:`take_block_events`. Its first events tell what is recorded already. Costs a hash and
        a copy of tokens that are recorded, and nothing elsewhere."""
        self._core.watch_blocks()

    def unwatch_blocks(self) -> None:
        """End the log, as :meth:`close` does too; what it holds may still be taken."""
        self._core.unwatch_blocks()

    def retell_blocks(self) -> None:
        """Have the next events tell everything anew, as if watching had just begun."""
        self._core.retell_blocks()

    def take_block_events(self, timeout_s: float = 0.0) -> list[BlockEvent] | None:
        """The events since the last call, in order; waits for some until the time is over. None
        when the log has ended and all of it has been taken.

        What is stored has ``blocks`` (hashes of everything up to each block's end), ``tokens``,
        ``parent`` (the block before; None at the beginning of a prompt) and ``cache_salt``; what is
        removed has ``blocks``; CLEARED says that nothing is recorded. Should millions of tokens
        wait, the log is dropped, and the next events tell everything anew."""
        return self._core.take_block_events(timeout_s)

    # --------------------------------------------------------------------------------- tracing

    def start_trace(self, path: str | os.PathLike[str]) -> None:
        """Write every operation and driver call from now on to ``path`` (JSON lines), for
        ``flexinfer replay``. The file holds token ids. Raises DriverError if it cannot be made."""
        self._core.start_trace(os.fspath(path))

    def stop_trace(self) -> None:
        """End the trace, as :meth:`close` does too. Raises DriverError if it is incomplete."""
        self._core.stop_trace()

    @property
    def tracing(self) -> bool:
        """Whether a trace is being written."""
        return self._core.is_tracing()

    # --------------------------------------------------------------------------------- insight

    @property
    def resident_bytes(self) -> int:
        """Physical bytes at this moment, as in :meth:`stats` but at no cost."""
        return self._core.resident_bytes()

    def mapping_times(self) -> _vtensor.MappingTimes:
        """Exposed and hidden microseconds of driver work so far; cheap enough for every step."""
        return self._core.mapping_times()

    def stats(self) -> Stats:
        """All numbers at this moment."""
        return self._core.stats()

    def snapshot(self) -> _vtensor.Snapshot:
        """The memory map: every vTensor's chunks, every chunk's sharers, every recorded prefix."""
        return self._core.snapshot()

    def check_integrity(self) -> None:
        """Recompute all invariants; raises IntegrityError naming the first broken one."""
        self._core.check_integrity()


NO_CHUNK: int = _vtensor.NO_CHUNK
"""In page tables and recorded prefixes: a row that a window has left, given back."""


def kept_chunks(column: Sequence[int]) -> list[int]:
    """The chunks of one column of a page table, without the rows that were given back."""
    return [chunk for chunk in column if chunk != NO_CHUNK]


def torch_or_dlpack(exported: Any) -> Any:
    """A torch tensor where torch is installed, else the DLPack object itself."""
    try:
        import torch
    except ImportError:
        return exported
    return torch.from_dlpack(exported)
