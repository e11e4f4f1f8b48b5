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


def memfd_bytes() -> int:
    """Bytes that the system holds for all memfds of this process."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor of the listing itself is gone by now
            if "memfd:" in os.readlink(entry):
                total += os.stat(entry).st_blocks * 512
    return total


def mapped_shmem_bytes() -> int:
    """Shared memory that stands in this process's page tables, aliases counted by share."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss_Shmem:"):
            return int(line.split()[1]) * 1024
    pytest.skip("this kernel tells no Pss_Shmem")


@pytest.fixture
def manager() -> Iterator[VTensorManager]:
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


def test_the_system_holds_what_resident_bytes_says(manager: VTensorManager) -> None:
    before = memfd_bytes()
    write_prompt(manager, PREFIX)
    assert memfd_bytes() - before == manager.stats().resident_bytes == 8 * MIB - 3 * 65536


def test_a_prefix_of_eight_requests_stands_in_memory_once(manager: VTensorManager) -> None:
    write_prompt(manager, PREFIX)
    before = memfd_bytes()
    requests = [manager.create(PREFIX) for _ in range(8)]
    assert [request.num_cached_tokens for request in requests] == [1000] * 8
    assert all((request.k(3)[::100] == 1).all() for request in requests)
    assert memfd_bytes() == before
    stats = manager.stats()
    assert stats.mapped_bytes == 8 * stats.resident_bytes


def test_each_of_eight_requests_that_write_on_costs_one_chunk(manager: VTensorManager) -> None:
    write_prompt(manager, PREFIX[:998])  # not at a chunk border: 8 tokens per chunk
    before = memfd_bytes()
    requests = [manager.create(PREFIX[:998]) for _ in range(8)]
    assert manager.try_extend(requests, [1000] * 8)
    # the first one took the tail chunk over
    assert memfd_bytes() - before == 7 * manager.chunk_bytes


def test_trim_gives_memory_back_to_the_system(manager: VTensorManager) -> None:
    before = memfd_bytes()
    mapped_before = mapped_shmem_bytes()
    write_prompt(manager, PREFIX)
    assert mapped_shmem_bytes() - mapped_before > 6 * MIB
    manager.reset_prefix_cache()
    manager.trim()
    assert memfd_bytes() == before
    assert mapped_shmem_bytes() - mapped_before < MIB


def test_a_lower_budget_gives_memory_back_to_the_system(manager: VTensorManager) -> None:
    before = memfd_bytes()
    write_prompt(manager, PREFIX)
    manager.memory_budget = 2 * MIB
    assert memfd_bytes() - before <= 2 * MIB
    assert 0 < manager.match_prefix(PREFIX) <= 256


def test_the_budget_bounds_what_the_system_holds(manager: VTensorManager) -> None:
    manager.memory_budget = 16 * MIB
    before = memfd_bytes()
    for tenant in range(5):
        write_prompt(manager, PREFIX, salt=str(tenant))
    assert memfd_bytes() - before <= 16 * MIB


def test_close_leaves_nothing_behind() -> None:
    before = memfd_bytes()
    with VTensorManager(SPEC, max_requests=2, memory_budget=32 * MIB) as manager:
        manager.create().extend(1000)
    assert memfd_bytes() == before
