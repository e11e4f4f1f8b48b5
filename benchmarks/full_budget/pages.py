"""PagedManager: the measured baseline's memory: a pool of pages, a block table, a prefix cache.

It stands where the engine has a VTensorManager, as far as a run without swapping, forks, pins and
sleep asks: the same scheduler, runner and model then compute over paged KV. After PagedAttention
(Kwon et al., SOSP 2023) and vLLM's block pool: a page that nobody uses keeps its contents and its
name, the chain of hashes of all tokens up to its end, until it is the least recently freed and a
page is needed. Nothing of the driver is called and nothing is mapped. Not thread-safe.

Invariants:
1. A page is free exactly when no request has it; a free page may have a name.
2. A name belongs to one page at most.
3. `table[slot, j]` is page j of the request in `slot`; the device's copy is refreshed by
   `begin_step()`, before the kernels that read it are launched on the same stream.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from flexinfer.vtensor import KVSpec


class PagePool:
    """Reference counts and names of pages; the free ones in the order in which they are taken."""

    def __init__(self, num_pages: int) -> None:
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))
        self.num_evicted = 0
        self._users = [0] * num_pages
        self._name_of: list[bytes | None] = [None] * num_pages
        self._page_of: dict[bytes, int] = {}

    def find(self, name: bytes) -> int | None:
        return self._page_of.get(name)

    def share(self, page: int) -> None:
        self._users[page] += 1
        self.free.pop(page, None)

    def take(self) -> int:
        """A page for one user, that of the least recently freed; its old contents lose their name.
        REQUIRES: one is free."""
        page, _ = self.free.popitem(last=False)
        name = self._name_of[page]
        if name is not None:
            del self._page_of[name]
            self._name_of[page] = None
            self.num_evicted += 1
        self._users[page] = 1
        return page

    def give_back(self, page: int) -> None:
        self._users[page] -= 1
        if not self._users[page]:
            self.free[page] = None

    def record(self, page: int, name: bytes) -> None:
        """Let others find the page; another page of that name stays the one that is found."""
        if self._name_of[page] is None and name not in self._page_of:
            self._name_of[page] = name
            self._page_of[name] = page


@dataclass(eq=False)
class PagedRequest:
    """What the engine holds of one request: the part of VTensor that it uses."""

    manager: PagedManager
    slot: int
    pages: list[int]
    num_cached_tokens: int

    def info(self) -> SimpleNamespace:
        num_shared = self.num_cached_tokens // self.manager.page_tokens
        return SimpleNamespace(chunks_aliased=num_shared, chunks_copied=0, cut_by_window=0)

    def extend(self, num_tokens: int) -> None:
        if not self.try_extend(num_tokens):
            raise MemoryError(f"no pages for {num_tokens} tokens")

    def try_extend(self, num_tokens: int) -> bool:
        return self.manager.try_extend([self], [num_tokens])

    def record_prefix(self, tokens: Any) -> int:
        """Whole pages of these tokens, this request's first ones."""
        for page, name in zip(self.pages, self.manager.names(tokens, ""), strict=False):
            self.manager.pool.record(page, name)
        return 0

    def release(self) -> None:
        self.manager.release(self)


class PagedManager:
    """Args as VTensorManager's; `page_tokens` in place of chunks."""

    asleep = closed = False
    on_shortage = None

    def __init__(
        self,
        spec: KVSpec,
        device: torch.device,
        dtype: torch.dtype,
        *,
        max_requests: int,
        memory_budget: int,
        page_tokens: int,
    ) -> None:
        self.spec = spec
        self.page_tokens = page_tokens
        self.chunk_bytes = page_tokens * spec.bytes_per_token
        num_pages = memory_budget // self.chunk_bytes
        self.memory_budget = num_pages * self.chunk_bytes
        self.pool = PagePool(num_pages)
        self._free_slots = list(range(max_requests))[::-1]
        self._num_aliased = 0
        size = (num_pages, page_tokens, spec.num_kv_heads, spec.head_dim)
        self._kv = [
            tuple(torch.zeros(size, dtype=dtype, device=device) for _ in range(2))
            for _ in range(spec.num_layers)
        ]
        shape = (max_requests, -(-spec.max_seq_len // page_tokens))
        self.host_table = torch.zeros(shape, dtype=torch.int32)
        self._rows = self.host_table.numpy()
        self.table = self.host_table.to(device)
        """[max_requests, pages] int32, on the device; on a CPU the host's own."""
        self._is_stale = False

    def k(self, layer: int) -> torch.Tensor:
        """[num_pages, page_tokens, num_kv_heads, head_dim]"""
        return self._kv[layer][0]

    def v(self, layer: int) -> torch.Tensor:
        return self._kv[layer][1]

    def close(self) -> None:
        self._kv = []

    # Requests.

    def names(self, tokens: Any, salt: str) -> Iterator[bytes]:
        """Of each whole page of these tokens (int32 buffer), in order."""
        name = salt.encode()
        size = 4 * self.page_tokens
        data = memoryview(tokens).cast("B")
        for first in range(0, len(data) - size + 1, size):
            name = hashlib.blake2b(name + data[first : first + size], digest_size=16).digest()
            yield name

    def _match(self, tokens: Any, salt: str) -> list[int]:
        pages = []
        for name in self.names(tokens, salt):
            page = self.pool.find(name)
            if page is None:
                break
            pages.append(page)
        return pages

    def match_prefix(self, tokens: Any, cache_salt: str = "") -> int:
        return len(self._match(tokens, cache_salt)) * self.page_tokens

    def create(self) -> PagedRequest:
        created = self.try_create()
        if created is None:
            raise MemoryError("all slots hold live requests")
        return created

    def try_create(
        self,
        tokens: Any = None,
        *,
        cache_salt: str = "",
        max_cached_tokens: int = 0,
        **_: Any,
    ) -> PagedRequest | None:
        if not self._free_slots:
            return None
        pages = [] if tokens is None else self._match(tokens, cache_salt)
        pages = pages[: max_cached_tokens // self.page_tokens]
        for page in pages:
            self.pool.share(page)
        self._num_aliased += len(pages)
        slot = self._free_slots.pop()
        self._rows[slot, : len(pages)] = pages
        self._is_stale = True
        return PagedRequest(self, slot, pages, len(pages) * self.page_tokens)

    def try_extend(self, requests: Sequence[PagedRequest], num_tokens: Sequence[int]) -> bool:
        wanted = [
            (request, count - len(request.pages))
            for request, end in zip(requests, num_tokens, strict=True)
            if (count := -(-end // self.page_tokens)) > len(request.pages)
        ]
        if sum(count for _, count in wanted) > len(self.pool.free):
            return False
        for request, count in wanted:
            first = len(request.pages)
            request.pages += [self.pool.take() for _ in range(count)]
            self._rows[request.slot, first : first + count] = request.pages[first:]
            self._is_stale = True
        return True

    def release(self, request: PagedRequest) -> None:
        for page in reversed(request.pages):  # so that heads, which more prompts share, go last
            self.pool.give_back(page)
        request.pages = []
        self._free_slots.append(request.slot)

    # Steps.

    def begin_step(self) -> None:
        """Bring the block table to the device. From a buffer of its own: the next step may be
        scheduled while the copy runs."""
        if self._is_stale and self.table.device.type != "cpu":
            self.table.copy_(self.host_table.pin_memory(), non_blocking=True)
        self._is_stale = False

    def end_step(self, stream: int = 0) -> None:
        """Later steps are later on the stream: a page may change hands at once."""

    def pre_extend(self, requests: Sequence[PagedRequest], num_tokens: Sequence[int]) -> None:
        """A page costs nothing that could be done ahead."""

    def set_busy(self, busy: bool) -> None:
        """All pages are there from the start."""

    def shared_ranges(self, requests: Any, num_tokens: Any) -> list[Any]:
        return []

    # Numbers.

    def bytes_for(self, num_tokens: int, *, with_windows: bool = True) -> int:
        return -(-num_tokens // self.page_tokens) * self.chunk_bytes

    @property
    def available_bytes(self) -> int:
        return len(self.pool.free) * self.chunk_bytes

    def trim(self) -> int:
        return 0

    def evict(self, num_bytes: int) -> int:
        return 0

    def mapping_times(self) -> SimpleNamespace:
        return SimpleNamespace(exposed_us=0.0, hidden_us=0.0, pre_extended_rows=0)

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(
            budget_bytes=self.memory_budget,
            resident_bytes=self.memory_budget,
            chunks_aliased=self._num_aliased,
            chunks_evicted=self.pool.num_evicted,
        )
