"""Adapters: the LoRA adapters of an engine, from their loading to the end of the last request that
uses them. Not thread-safe.

KV is a function of the adapter, too: requests with different ones must never share it. The prefix
cache, pins and KV events tell them apart by a salt that has the digest of the adapter's files.

    without an adapter   SALT, which does not begin with "lora/"
    with one             lora/DIGEST/SALT
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from flexinfer.errors import RequestError
from flexinfer.lora.request import LoRARequest

if TYPE_CHECKING:
    import torch

    from flexinfer.models.describe import LoadedModel

SALT_PREFIX = "lora/"

_numbers = count(1)
"""Of this process: engines may share a model."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """One that is loaded."""

    request: LoRARequest
    number: int
    """By which plans name it; of two loadings of one adapter, each has its own."""
    digest: str


def salt_of(cache_salt: str, adapter: Adapter | None) -> str:
    """What tells KV of this adapter and with this salt from all other."""
    return cache_salt if adapter is None else f"{SALT_PREFIX}{adapter.digest}/{cache_salt}"


class Adapters:
    """
    Invariant: the model's layers have the weights of those in `_by_id`, and of removed ones that
    unfinished requests use.
    """

    def __init__(self, loaded: LoadedModel | None = None, max_rank: int = 0) -> None:
        """loaded: None: this engine takes no adapters."""
        from flexinfer.lora.places import Places

        self._max_rank = max_rank
        self._loaded = loaded
        self._places = Places(loaded)
        self._by_id: dict[int, Adapter] = {}
        self._removed: set[int] = set()
        self._uses: Counter[int] = Counter()

    @property
    def ids(self) -> set[int]:
        """`lora_int_id` of those that are loaded."""
        return set(self._by_id)

    def chosen(self, request: LoRARequest | None) -> Adapter | None:
        """What `add` gives for it; None for none."""
        return None if request is None else self.add(request)

    def add(self, request: LoRARequest) -> Adapter:
        """Load it, unless it is there. Raises RequestError for an adapter that cannot be served,
        and for an id that another one has."""
        if self._loaded is None:
            raise RequestError("LoRA adapters are off: set enable_lora=True (--enable-lora)")
        if not isinstance(request, LoRARequest):
            raise RequestError(f"lora_request must be a LoRARequest, got {request!r}")
        found = self._by_id.get(request.lora_int_id)
        if found is None:
            found = self._load(request, self._loaded.device)
            self._by_id[request.lora_int_id] = found
        elif found.request != request:
            raise RequestError(
                f"lora_int_id {request.lora_int_id} is the adapter {found.request.lora_name!r} "
                f"({found.request.lora_path}): give {request.lora_name!r} another id, or remove "
                "that one first"
            )
        return found

    def remove(self, lora_int_id: int) -> bool:
        """No request can choose it any more; those that have chosen it are served to their end.
        False: there is none."""
        adapter = self._by_id.pop(lora_int_id, None)
        if adapter is None:
            return False
        self._removed.add(adapter.number)
        self._drop_unused(adapter.number)
        return True

    def begin(self, number: int) -> None:
        """A request uses it from now on; 0: none."""
        if number:
            self._uses[number] += 1

    def end(self, number: int) -> None:
        """That request has ended."""
        if number:
            self._uses[number] -= 1
            self._drop_unused(number)

    def close(self) -> None:
        """The model is as it was."""
        self._places.close()

    def _load(self, request: LoRARequest, device: torch.device) -> Adapter:
        from flexinfer.lora.peft_folder import PeftFolder

        folder = PeftFolder(request.lora_name, request.lora_path, self._places, self._max_rank)
        updates = folder.read(device)
        adapter = Adapter(request, next(_numbers), folder.digest())
        for place, update in updates:
            place.updates[adapter.number] = update
        return adapter

    def _drop_unused(self, number: int) -> None:
        if number in self._removed and not self._uses[number]:
            self._removed.discard(number)
            del self._uses[number]
            self._places.forget(number)
