"""Adapters: the LoRA adapters of an engine, from their loading to the end of the last request that
uses them.

Reading files takes long and changes nothing: any thread does it. What is read then takes its place
in the model's layers between two steps, in no time.

Thread-safety: `find`, `read` and `prepare` from any thread, all else from the engine's alone.

KV is a function of the adapter, too: requests with different ones must never share it. The prefix
cache, pins and KV events tell them apart by a salt that has the digest of the adapter's files.

    without an adapter   SALT, which does not begin with "lora/"
    with one             lora/DIGEST/SALT
"""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from flexinfer.errors import RequestError
from flexinfer.lora.request import LoRARequest
from flexinfer.runtime.openmp import use_one_thread

if TYPE_CHECKING:
    from flexinfer.lora.peft_folder import Updates
    from flexinfer.models.describe import LoadedModel

SALT_PREFIX = "lora/"
NUM_THREADS = 2
"""That read files for `prepare`."""

_numbers = count(1)
"""Of this process: engines may share a model."""


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """One that was read. A request that has chosen it is served to its end, wherever it was when
    the adapter was removed: whoever holds this holds the weights."""

    request: LoRARequest
    number: int
    """By which plans name it; of two loadings of one adapter, each has its own."""
    digest: str
    updates: Updates
    """In the host's memory."""


Choice = LoRARequest | Adapter | None


def salt_of(cache_salt: str, adapter: Adapter | None) -> str:
    """What tells KV of this adapter and with this salt from all other."""
    return cache_salt if adapter is None else f"{SALT_PREFIX}{adapter.digest}/{cache_salt}"


class Adapters:
    """
    Invariant: the model's layers have the weights of those in `_by_id`, and of removed ones that
    unfinished requests use: together `_installed`, by number.
    """

    def __init__(self, loaded: LoadedModel | None = None, max_rank: int = 0) -> None:
        """loaded: None: this engine takes no adapters."""
        from flexinfer.lora.places import Places

        self._max_rank = max_rank
        self._loaded = loaded
        self._places = Places(loaded)
        self._by_id: dict[int, Adapter] = {}
        self._installed: dict[int, Adapter] = {}
        self._uses: Counter[int] = Counter()
        self._lock = threading.Lock()  # of the two below
        self._pool: ThreadPoolExecutor | None = None
        self._being_read: dict[LoRARequest, Future[Adapter]] = {}

    @property
    def ids(self) -> set[int]:
        """`lora_int_id` of those that are loaded."""
        return set(self._by_id)

    def find(self, request: LoRARequest) -> Adapter | None:
        """The loaded one. Raises RequestError where there are no adapters, and for an id that
        another one has."""
        if self._loaded is None:
            raise RequestError("LoRA adapters are off: set enable_lora=True (--enable-lora)")
        if not isinstance(request, LoRARequest):
            raise RequestError(f"lora_request must be a LoRARequest, got {request!r}")
        found = self._by_id.get(request.lora_int_id)
        if found is not None and found.request != request:
            raise RequestError(
                f"lora_int_id {request.lora_int_id} is the adapter {found.request.lora_name!r} "
                f"({found.request.lora_path}): give {request.lora_name!r} another id, or remove "
                "that one first"
            )
        return found

    def read(self, request: LoRARequest) -> Adapter:
        """Check and read its files. Raises RequestError for an adapter that cannot be served."""
        from flexinfer.lora.peft_folder import PeftFolder

        folder = PeftFolder(request.lora_name, request.lora_path, self._places, self._max_rank)
        digest, updates = folder.read()
        return Adapter(request, next(_numbers), digest, updates)

    def prepare(self, request: LoRARequest) -> Future[Adapter]:
        """`read` in a thread of a pool, once for all who ask meanwhile. Do not cancel the future.
        Raises RuntimeError after `close`."""
        with self._lock:
            begun = self._being_read.get(request)
            if begun is not None:
                return begun
            if self._pool is None:
                # Alone: the engine's step has the cores.
                self._pool = ThreadPoolExecutor(NUM_THREADS, "flexinfer-adapter", use_one_thread)
            future = self._being_read[request] = self._pool.submit(self.read, request)
        future.add_done_callback(lambda _: self._note_read(request))  # at once, if it is done
        return future

    def load(self, adapter: Adapter) -> Adapter:
        """Let requests choose what was read; if an equal one is loaded, it is that one. Raises
        RequestError for an id that another one has."""
        found = self.find(adapter.request)
        if found is None:
            found = self._by_id[adapter.request.lora_int_id] = adapter
            self._install(adapter)
        return found

    def add(self, request: LoRARequest) -> Adapter:
        """Read and load it, unless it is there; requests wait. Raises RequestError."""
        return self.find(request) or self.load(self.read(request))

    def chosen(self, choice: Choice) -> Adapter | None:
        """Which one a request is for, loaded if need be. Raises RequestError."""
        return choice if choice is None or isinstance(choice, Adapter) else self.add(choice)

    def remove(self, lora_int_id: int) -> bool:
        """No request can choose it any more; those that have chosen it are served to their end.
        False: there is none."""
        adapter = self._by_id.pop(lora_int_id, None)
        if adapter is None:
            return False
        self._drop_unused(adapter)
        return True

    def begin(self, adapter: Adapter | None) -> None:
        """A request uses it from now on."""
        if adapter is not None:
            self._uses[adapter.number] += 1
            self._install(adapter)

    def end(self, number: int) -> None:
        """That request has ended; 0: it had none."""
        if number:
            self._uses[number] -= 1
            self._drop_unused(self._installed[number])

    def close(self) -> None:
        """The model is as it was, but for what other engines have in it."""
        with self._lock:
            if self._pool is not None:
                self._pool.shutdown(wait=False)
        self._by_id.clear()
        for adapter in list(self._installed.values()):
            self._drop_unused(adapter)
        self._places.close()

    def _install(self, adapter: Adapter) -> None:
        if adapter.number not in self._installed:
            assert self._loaded is not None
            self._installed[adapter.number] = adapter
            for place, update in adapter.updates:
                place.updates[adapter.number] = update.to(self._loaded.device)

    def _drop_unused(self, adapter: Adapter) -> None:
        number = adapter.number
        if not self._uses[number] and self._by_id.get(adapter.request.lora_int_id) is not adapter:
            del self._uses[number], self._installed[number]
            for place, _ in adapter.updates:
                del place.updates[number]

    def _note_read(self, request: LoRARequest) -> None:
        with self._lock:
            del self._being_read[request]
