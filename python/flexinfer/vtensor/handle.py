"""VTensor: one request's contiguous KV range. `flexinfer.vtensor` is where callers find it.

Thread-safety: all of it may be called from any thread. The manager knows a vTensor by its id; this
is the object that callers hold, and that releases it when it is collected.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from flexinfer import _vtensor
from flexinfer.vtensor.arguments import check_layer, check_length, token_array

if TYPE_CHECKING:
    from flexinfer.vtensor.open_core import OpenCore


class VTensor:
    """One request's contiguous KV range. Made by :meth:`VTensorManager.create` or :meth:`fork`."""

    __slots__ = ("__weakref__", "_manager", "_released", "id", "num_cached_tokens", "slot")

    def __init__(self, manager: OpenCore, vtensor_id: int) -> None:
        info = manager._core.info(vtensor_id)
        self._manager = manager
        self._released = False
        self.id: int = vtensor_id
        self.slot: int = info.slot
        self.num_cached_tokens: int = info.num_cached_tokens

    def __repr__(self) -> str:
        if self.released:
            return f"VTensor(id={self.id}, released)"
        info = self.info()
        return f"VTensor(id={self.id}, slot={self.slot}, num_tokens={info.num_tokens})"

    def __del__(self) -> None:
        # Never raises: the manager may be closed, or half of the interpreter may be gone.
        if not getattr(self, "_released", True) and not self._manager.closed:
            with suppress(Exception):
                self.release()

    @property
    def released(self) -> bool:
        """Whether :meth:`release` has been called, or the manager is closed."""
        return self._released or self._manager.closed

    @property
    def num_tokens(self) -> int:
        """Declared length: tokens whose KV is, or is being, written."""
        return self.info().num_tokens

    @property
    def mapped_tokens(self) -> int:
        """Tokens that have memory behind them."""
        return self.info().mapped_tokens

    def info(self) -> _vtensor.VTensorInfo:
        """Slot, lengths, mapped bytes, chunks aliased and copied. Raises ReleasedError."""
        return self._manager._core.info(self.id)

    def extend(self, num_tokens: int) -> None:
        """Back the first ``num_tokens`` tokens with memory that this vTensor may write.

        A tail chunk that others share is copied first, unless this vTensor continues exactly where
        its last writer stopped. Raises OutOfMemoryError, with nothing changed.
        """
        self._manager.extend_ids([self.id], [check_length(num_tokens)])

    def try_extend(self, num_tokens: int) -> bool:
        """As :meth:`extend`; False instead of OutOfMemoryError."""
        return self._manager.try_extend_ids([self.id], [check_length(num_tokens)])

    def truncate(self, num_tokens: int) -> None:
        """Give up the tokens from ``num_tokens`` on. Raises ValueError if that is more."""
        self._manager._core.truncate(self.id, check_length(num_tokens))

    def record_prefix(self, tokens: Any) -> int:
        """Let later requests share the KV of ``tokens``, this vTensor's first tokens.

        Call it when their KV has been written. Returns how many of them are newly recorded. On a
        CPU, of fewer tokens than it has, whole chunks only while tensor views of it are alive.
        """
        return self._manager._core.record_prefix(self.id, token_array(tokens))

    def fork(self) -> VTensor:
        """A vTensor with the same contents; whole chunks are shared, the tail is copied on write.

        Waits for a step as :meth:`VTensorManager.create` does. Raises OutOfMemoryError when no slot
        is left.
        """
        forked = self._manager._core.try_fork(self.id)
        if forked is None:
            raise self._manager._no_slot()
        return VTensor(self._manager, forked)

    def try_swap_out(self) -> bool:
        """Move the contents to the swap store and give the chunks up; the addresses stay.

        False, with nothing changed, when the store is too full.
        """
        return self._manager._core.try_swap_out(self.id)

    def try_swap_in(self, tokens: Any = ()) -> bool:
        """Bring the contents back to the same addresses; checksums are verified.

        Whole chunks of ``tokens`` that are recorded are shared instead. False, with nothing
        changed, when memory is short.
        """
        manager, wanted = self._manager, token_array(tokens)
        return manager._core.try_swap_in(self.id, wanted) or (
            manager._got_memory_back() and manager._core.try_swap_in(self.id, wanted)
        )

    def release(self) -> None:
        """Give the range and its chunk references back. Views of it stay valid and keep both."""
        self._manager._core.release(self.id)
        self._released = True

    def k(self, layer: int) -> Any:
        """Keys of ``layer``, zero-copy ``[num_tokens, num_kv_heads, key_dim]``.

        Write to tokens that nobody shares: not recorded, not forked, from ``num_cached_tokens`` on.
        What is written to others stays this vTensor's on a CPU, and reaches all of them on CUDA.
        Raises OutOfMemoryError when a chunk of recorded and later tokens cannot be copied for that.
        """
        return self._view(layer, _vtensor.KV.KEY)

    def v(self, layer: int) -> Any:
        """Values of ``layer``, as :meth:`k`. Raises LookupError where it keeps keys alone."""
        return self._view(layer, _vtensor.KV.VALUE)

    def _view(self, layer: int, which: _vtensor.KV) -> Any:
        manager = self._manager
        dtype = manager.spec.group_of(check_layer(layer)).dtype
        exported = manager._core.view(self.id, layer, which, dtype)
        return manager._from_dlpack(exported)
