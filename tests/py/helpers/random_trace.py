"""A random life of a manager, to be traced and replayed. Shared by test_trace and test_replay."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from flexinfer.errors import OutOfMemoryError
from flexinfer.vtensor import KVSpec, VTensor, VTensorManager

CHUNK_BYTES = 4096
SPEC = KVSpec(num_layers=2, num_kv_heads=2, head_dim=64, max_seq_len=96)  # 2 KiB a token


def open_manager(device: str = "sim", **options: Any) -> VTensorManager:
    """A small manager in which memory is often short."""
    options = {
        "memory_budget": 40 * CHUNK_BYTES,
        "chunk_bytes": CHUNK_BYTES,
        "max_requests": 6,
        "swap_space": "1MiB",
        **options,
    }
    return VTensorManager(SPEC, device, **options)


@dataclass
class _Live:
    vtensor: VTensor
    tokens: list[int]
    swapped: bool = False


class RandomLife:
    """Random operations; ``peak_resident_bytes`` is the highest seen after any of them."""

    def __init__(self, manager: VTensorManager, seed: int, *, drain: bool = True) -> None:
        self.manager = manager
        self.peak_resident_bytes = 0
        self._random = random.Random(seed)
        self._drain = drain
        self._live: list[_Live] = []
        self._recorded: list[list[int]] = []
        self._num_created = 0

    def run(self, num_operations: int) -> None:
        """Do so many operations, then release every vTensor."""
        actions = [self.create] * 3 + [self.extend] * 6 + [self.release] * 2
        actions += [self.pre_extend, self.record, self.fork, self.truncate, self.swap, self.upkeep]
        for _ in range(num_operations):
            self._random.choice(actions)()
            stats = self.manager.stats()
            self.peak_resident_bytes = max(self.peak_resident_bytes, stats.resident_bytes)
        for live in self._live:
            live.vtensor.release()

    def _pick(self, *, swapped: bool = False) -> _Live | None:
        choices = [live for live in self._live if swapped or not live.swapped]
        return self._random.choice(choices) if choices else None

    def _some_tokens(self, most: int) -> list[int]:
        return [self._random.randrange(5) for _ in range(self._random.randint(1, most))]

    def create(self) -> None:
        tokens: list[int] = []
        if self._recorded and self._random.random() < 0.7:
            tokens = self._random.choice(self._recorded)[: self._random.randrange(1, 60)]
        tokens = (tokens + self._some_tokens(30))[:90]
        self._num_created += 1
        salt = self._random.choice(["", "tenant"])
        vtensor = self.manager.try_create(
            tokens, cache_salt=salt, label=f"request-{self._num_created}"
        )
        if vtensor is None:
            return
        if vtensor.try_extend(len(tokens)):
            self._live.append(_Live(vtensor, tokens))
        else:
            vtensor.release()

    def extend(self) -> None:
        live = self._pick()
        more = self._some_tokens(6)
        if live is None or len(live.tokens) + len(more) > SPEC.max_seq_len:
            return
        if live.vtensor.try_extend(len(live.tokens) + len(more)):
            live.tokens = live.tokens + more

    def pre_extend(self) -> None:
        live = self._pick()
        if live is not None:
            self.manager.pre_extend([live.vtensor], [min(96, len(live.tokens) + 8)])
        if self._drain:
            self.manager.drain()

    def release(self) -> None:
        live = self._pick(swapped=True)
        if live is None:
            return
        if not live.swapped and self._random.random() < 0.8:
            live.vtensor.record_prefix(live.tokens)
            self._recorded.append(live.tokens)
        live.vtensor.release()
        self._live.remove(live)

    def record(self) -> None:
        live = self._pick()
        if live is None:
            return
        live.vtensor.record_prefix(live.tokens)
        self._recorded.append(live.tokens)
        self.manager.match_prefix(live.tokens)
        if self._random.random() < 0.1:
            self.manager.pin_prefix(live.tokens, "owner")

    def fork(self) -> None:
        live = self._pick()
        if live is None:
            return
        try:
            child = live.vtensor.fork()
        except OutOfMemoryError:
            return
        self._live.append(_Live(child, list(live.tokens)))

    def truncate(self) -> None:
        live = self._pick()
        if live is not None:
            length = self._random.randrange(len(live.tokens) + 1)
            live.vtensor.truncate(length)
            live.tokens = live.tokens[:length]

    def swap(self) -> None:
        live = self._pick(swapped=True)
        if live is None:
            return
        if not live.swapped:
            live.swapped = live.vtensor.try_swap_out()
        elif live.vtensor.try_swap_in(live.tokens):
            live.swapped = False

    def upkeep(self) -> None:
        what = self._random.randrange(8)
        if what == 0:
            self.manager.evict(2 * CHUNK_BYTES)
        elif what == 1:
            self.manager.trim()
        elif what == 2:
            self.manager.unpin_prefix("owner")
        elif what == 3:
            self.manager.drain()
            self.manager.sleep()
            self.manager.wake()
        elif what == 4:
            try:
                self.manager.memory_budget = self._random.choice([30, 40]) * CHUNK_BYTES
            except OutOfMemoryError:
                return
        elif what == 5 and self._random.random() < 0.3:
            self.manager.reset_prefix_cache()
