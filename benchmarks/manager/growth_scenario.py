"""Managers that hold much, and the operations that are timed on them. Simulated memory."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flexinfer.vtensor import KVSpec, SimConfig, VTensor, VTensorManager

CHUNK_BYTES = 2 << 20
CHUNK_TOKENS = 16
SPEC = KVSpec(32, 8, 128, "float16", 131_072)
"""Llama-3-8B, interleaved: 16 tokens per chunk of 2 MiB, one plane."""

PROMPT_TOKENS = 2_048
NUM_LIVE = 64
NUM_PARKED = 64

LAYOUTS = {
    "Llama-3-8B, interleaved": KVSpec(32, 8, 128, "float16", 8192),
    "Llama-3-8B, dense": KVSpec(32, 8, 128, "float16", 8192, layers_per_plane=1),
    "Llama-3-8B, 2 layers per plane": KVSpec(32, 8, 128, "float16", 8192, layers_per_plane=2),
    "Llama-3-70B, interleaved": KVSpec(80, 8, 128, "float16", 8192),
    "Qwen2.5-0.5B, interleaved": KVSpec(24, 2, 64, "float16", 8192),
}
"""Each with the default chunk size in a budget of 16 GiB."""


def prompt(number: int, num_tokens: int) -> Any:
    """Tokens that share no prefix with another number's."""
    tokens = array("i", [7]) * num_tokens
    tokens[0] = number
    return tokens


def record(manager: VTensorManager, tokens: Any) -> VTensor:
    vtensor = manager.create(tokens)
    vtensor.extend(len(tokens))
    vtensor.record_prefix(tokens)
    return vtensor


class Scenario:
    """A manager with `cached_tokens` in recorded prefixes that nothing maps, `parked_chunks` in
    recorded prefixes behind 64 parked slots, and 64 live requests; a known prompt among them
    whose tokens are `path_nodes` nodes of the tree."""

    def __init__(
        self, rounds: int, *, cached_tokens: int = 0, parked_chunks: int = 0, path_nodes: int = 1
    ) -> None:
        self._rounds = rounds
        self._cached_tokens = cached_tokens
        self._parked_chunks = parked_chunks
        self._path_nodes = path_nodes
        self._numbers = iter(range(1_000_000, 2_000_000_000))

    def open(self) -> dict[str, Callable[[], float]]:
        """Each operation, to be called once per round; returns its microseconds."""
        spare = 2 * NUM_LIVE * (self._rounds + 40) + self._rounds * 1_000
        chunks = self._cached_tokens // CHUNK_TOKENS + self._parked_chunks + spare
        self._manager = VTensorManager(
            SPEC,
            "sim",
            max_requests=2 * NUM_LIVE + NUM_PARKED,
            memory_budget=chunks * CHUNK_BYTES,
            chunk_bytes=CHUNK_BYTES,
            park=self._parked_chunks > 0,
            sim=SimConfig(granularity=CHUNK_BYTES),
        )
        self._fill(self._manager)
        return self._operations(self._manager)

    def close(self) -> None:
        self._manager.close()

    def _fill(self, manager: VTensorManager) -> None:
        for _ in range(self._cached_tokens // PROMPT_TOKENS):
            record(manager, prompt(next(self._numbers), PROMPT_TOKENS)).release()
        per_slot = self._parked_chunks // NUM_PARKED * CHUNK_TOKENS
        parked = [
            record(manager, prompt(next(self._numbers), per_slot))
            for _ in range(NUM_PARKED if per_slot else 0)
        ]
        for vtensor in parked:
            vtensor.release()
        self.known = prompt(next(self._numbers), PROMPT_TOKENS)
        record(manager, self.known).release()
        rows = PROMPT_TOKENS // CHUNK_TOKENS
        for i in range(1, self._path_nodes):  # a branch at every node's end
            end = i * rows // self._path_nodes * CHUNK_TOKENS
            branch = self.known[:end] + array("i", [8]) * CHUNK_TOKENS
            record(manager, branch).release()
        self.live = [manager.create() for _ in range(NUM_LIVE)]
        manager.extend(self.live, [CHUNK_TOKENS] * NUM_LIVE)
        self.length = CHUNK_TOKENS
        manager.drain()

    def _operations(self, manager: VTensorManager) -> dict[str, Callable[[], float]]:
        return {
            "decode_step_64": lambda: _us(manager.try_extend, self.live, [self.length] * NUM_LIVE),
            "extend_64_by_a_chunk": lambda: self._extend(manager, CHUNK_TOKENS),
            "pre_extend_64_and_drain": lambda: self._pre_extend(manager),
            "create_miss": lambda: self._create(manager, prompt(next(self._numbers), 2_048)),
            "create_hit": lambda: self._create(manager, self.known),
            "release": lambda: _us(manager.create(self.known).release),
            "match_hit": lambda: _us(manager.match_prefix, self.known),
            "match_miss": lambda: _us(manager.match_prefix, prompt(next(self._numbers), 2_048)),
            "record_256": lambda: self._record(manager),
            "fork": lambda: self._fork(),
            "pin_and_unpin": lambda: self._pin(manager),
            "shared_ranges_64": lambda: _us(
                manager.shared_ranges, self.live, [self.length] * NUM_LIVE
            ),
            "available_bytes": lambda: _us(lambda: manager.available_bytes),
            "stats": lambda: _us(manager.stats),
            "evict_a_chunk": lambda: self._evict(manager),
        }

    def _extend(self, manager: VTensorManager, num_tokens: int) -> float:
        self.length += num_tokens
        return _us(manager.extend, self.live, [self.length] * NUM_LIVE)

    def _pre_extend(self, manager: VTensorManager) -> float:
        self.length += CHUNK_TOKENS
        start = time.perf_counter_ns()
        manager.pre_extend(self.live, [self.length] * NUM_LIVE)
        manager.drain()
        end = time.perf_counter_ns()
        manager.extend(self.live, [self.length] * NUM_LIVE)
        return (end - start) / 1e3

    def _create(self, manager: VTensorManager, tokens: Any) -> float:
        start = time.perf_counter_ns()
        vtensor = manager.create(tokens)
        end = time.perf_counter_ns()
        vtensor.release()
        return (end - start) / 1e3

    def _record(self, manager: VTensorManager) -> float:
        tokens = prompt(next(self._numbers), 256)
        vtensor = manager.create(tokens)
        vtensor.extend(len(tokens))
        taken = _us(vtensor.record_prefix, tokens)
        vtensor.release()
        return taken

    def _fork(self) -> float:
        start = time.perf_counter_ns()
        child = self.live[0].fork()
        end = time.perf_counter_ns()
        child.release()
        return (end - start) / 1e3

    def _pin(self, manager: VTensorManager) -> float:
        start = time.perf_counter_ns()
        manager.pin_prefix(self.known, "growth")
        manager.unpin_prefix("growth")
        return (time.perf_counter_ns() - start) / 1e3

    def _evict(self, manager: VTensorManager) -> float:
        """One chunk of the least recently used prefix, of which there is one at least."""
        record(manager, prompt(next(self._numbers), 16 * CHUNK_TOKENS)).release()
        return _us(manager.evict, CHUNK_BYTES)


def _us(operation: Callable[..., Any], *arguments: Any) -> float:
    start = time.perf_counter_ns()
    operation(*arguments)
    return (time.perf_counter_ns() - start) / 1e3


def metadata_bytes_per_token(layout: str, num_prompts: int) -> float:
    """Growth of this process's resident set per recorded token, prompts of 1,024 tokens."""
    spec = LAYOUTS[layout]
    with VTensorManager(spec, "sim", max_requests=1, memory_budget="16GiB") as manager:
        chunk_bytes = manager.chunk_bytes
    with VTensorManager(
        spec, "sim", max_requests=4, memory_budget=1 << 44, chunk_bytes=chunk_bytes
    ) as manager:
        for i in range(20):
            record(manager, prompt(-i - 1, 1_024)).release()
        before = _resident_bytes()
        for i in range(num_prompts):
            record(manager, prompt(i, 1_024)).release()
        return (_resident_bytes() - before) / (1_024 * num_prompts)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * 4096
