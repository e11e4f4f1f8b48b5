"""Physical memory, as the system counts it: sharing holds it once, trimming gives it back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from flexinfer.vtensor import KVSpec, VTensorManager

MIB = 1 << 20
SPEC = KVSpec(num_layers=4, num_kv_heads=4, head_dim=64, max_seq_len=2048)  # 8 KiB a token
PREFIX = list(range(1000))


def memfds() -> dict[int, int]:
    """Of the memfds of this process: the bytes that the system holds, by inode."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor of the listing itself is gone by now
            if "memfd:" in os.readlink(entry):
                about = os.stat(entry)
                found[about.st_ino] = about.st_blocks * 512
    return found


class Held:
    """Memory of what was opened since: other managers of this process may go meanwhile."""

    def __init__(self) -> None:
        self._others = set(memfds())

    def num_bytes(self) -> int:
        return sum(size for inode, size in memfds().items() if inode not in self._others)

    def mapped_bytes(self) -> int:
        """What of it stands in this process's page tables, aliases counted by share."""
        own, total, is_own = set(memfds()) - self._others, 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            words = line.split()
            if "-" in words[0]:
                is_own = int(words[4]) in own
            elif is_own and words[0] == "Pss:":
                total += int(words[1]) * 1024
        return total


@pytest.fixture
def held() -> Held:
    return Held()


@pytest.fixture
def manager(held: Held) -> Iterator[VTensorManager]:
    with VTensorManager(
        SPEC,
        max_requests=8,
        memory_budget=128 * MIB,
        chunk_bytes=64 * 1024,
        from_dlpack=np.from_dlpack,
    ) as manager:
        yield manager


def write_prompt(manager: VTensorManager, tokens: list[int], salt: str = "") -> None:
    """Computes a prompt, records it and leaves no vTensor behind."""
    vtensor = manager.create(tokens, cache_salt=salt)
    vtensor.extend(len(tokens))
    for layer in range(SPEC.num_layers):
        vtensor.k(layer)[vtensor.num_cached_tokens :] = 1
        vtensor.v(layer)[vtensor.num_cached_tokens :] = 1
    vtensor.record_prefix(tokens)
    vtensor.release()


def test_the_system_holds_what_resident_bytes_says(manager: VTensorManager, held: Held) -> None:
    assert held.num_bytes() == 0
    write_prompt(manager, PREFIX)
    assert held.num_bytes() == manager.stats().resident_bytes == 8 * MIB - 3 * 65536


def test_a_prefix_of_eight_requests_stands_in_memory_once(
    manager: VTensorManager, held: Held
) -> None:
    write_prompt(manager, PREFIX)
    before = held.num_bytes()
    requests = [manager.create(PREFIX) for _ in range(8)]
    assert [request.num_cached_tokens for request in requests] == [1000] * 8
    assert all((request.k(3)[::100] == 1).all() for request in requests)
    assert held.num_bytes() == before
    stats = manager.stats()
    assert stats.mapped_bytes == 8 * stats.resident_bytes


def test_each_of_eight_requests_that_write_on_costs_one_chunk(
    manager: VTensorManager, held: Held
) -> None:
    write_prompt(manager, PREFIX[:998])  # not at a chunk border: 8 tokens per chunk
    before = held.num_bytes()
    requests = [manager.create(PREFIX[:998]) for _ in range(8)]
    assert manager.try_extend(requests, [1000] * 8)
    # the first one took the tail chunk over
    assert held.num_bytes() - before == 7 * manager.chunk_bytes


def test_trim_gives_memory_back_to_the_system(manager: VTensorManager, held: Held) -> None:
    write_prompt(manager, PREFIX)
    assert held.mapped_bytes() > 6 * MIB
    manager.reset_prefix_cache()
    manager.trim()
    assert held.num_bytes() == 0
    assert held.mapped_bytes() < MIB


def test_a_lower_budget_gives_memory_back_to_the_system(
    manager: VTensorManager, held: Held
) -> None:
    write_prompt(manager, PREFIX)
    manager.memory_budget = 2 * MIB
    assert 0 < held.num_bytes() <= 2 * MIB
    assert 0 < manager.match_prefix(PREFIX) <= 256


def test_the_budget_bounds_what_the_system_holds(manager: VTensorManager, held: Held) -> None:
    manager.memory_budget = 16 * MIB
    for tenant in range(5):
        write_prompt(manager, PREFIX, salt=str(tenant))
    assert 0 < held.num_bytes() <= 16 * MIB


def test_close_leaves_nothing_behind(held: Held) -> None:
    with VTensorManager(SPEC, max_requests=2, memory_budget=32 * MIB) as manager:
        manager.create().extend(1000)
        assert held.num_bytes() > 0
    assert held.num_bytes() == 0
