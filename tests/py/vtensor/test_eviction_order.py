"""What is evicted, and when: one order by last use, parked or not; flat costs; nothing kept."""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexinfer.vtensor import KVSpec, SimConfig, VTensorManager

SPEC = KVSpec(num_layers=2, num_kv_heads=1, head_dim=64, dtype="float32", max_seq_len=4096)
CHUNK_TOKENS = 4


def open_manager(num_chunks: int, *, park: bool = True, max_requests: int = 8) -> VTensorManager:
    return VTensorManager(
        SPEC,
        "sim",
        max_requests=max_requests,
        chunk_bytes=CHUNK_TOKENS * SPEC.bytes_per_token,
        memory_budget=num_chunks * CHUNK_TOKENS * SPEC.bytes_per_token,
        park=park,
    )


def prompt(name: int, num_chunks: int) -> array[int]:
    return array("i", [name] * (num_chunks * CHUNK_TOKENS))


def serve(manager: VTensorManager, tokens: array[int]) -> int:
    """One request, recorded and released. Returns its cached tokens."""
    with_cache = manager.create(tokens)
    with_cache.extend(len(tokens))
    with_cache.record_prefix(tokens)
    with_cache.release()
    manager.check_integrity()
    return with_cache.num_cached_tokens


@given(st.lists(st.integers(1, 12), max_size=60), st.booleans(), st.integers(1, 8))
def test_prefixes_are_evicted_least_recently_used_first_parked_or_not(
    names: list[int], park: bool, max_requests: int
) -> None:
    """Prompts of 1 to 3 chunks; the reference gives up the last chunk of the oldest one."""
    budget = 10
    reference: OrderedDict[int, int] = OrderedDict()  # name -> chunks, oldest first
    with open_manager(budget, park=park, max_requests=max_requests) as manager:
        for name in names:
            num_chunks = name % 3 + 1
            cached = reference.pop(name, 0)
            while sum(reference.values()) + num_chunks > budget:
                oldest = next(iter(reference))
                reference[oldest] -= 1
                if reference[oldest] == 0:
                    del reference[oldest]
            reference[name] = num_chunks
            assert serve(manager, prompt(name, num_chunks)) == cached * CHUNK_TOKENS


def test_cold_documents_make_room_for_conversations_that_fit() -> None:
    with open_manager(100, max_requests=16) as manager:
        for name in range(20):
            serve(manager, prompt(1000 + name, 5))
        hits = [serve(manager, prompt(1 + i % 40, 2)) for i in range(200)]
    assert hits[40:] == [2 * CHUNK_TOKENS] * 160


def test_a_hit_on_the_head_of_a_prefix_leaves_the_rest_as_old_as_it_was() -> None:
    with open_manager(10, park=False) as manager:
        long = prompt(1, 5)
        serve(manager, long)
        serve(manager, prompt(2, 5))
        assert manager.match_prefix(long[: CHUNK_TOKENS * 2]) == CHUNK_TOKENS * 2
        serve(manager, prompt(3, 3))
        assert manager.match_prefix(prompt(2, 5)) == 5 * CHUNK_TOKENS
        assert manager.match_prefix(long) == 2 * CHUNK_TOKENS


def test_an_idle_manager_can_be_evicted() -> None:
    with open_manager(10) as manager:
        serve(manager, prompt(1, 6))
        assert manager.stats().parked_bytes > 0
        assert manager.evict(3 * manager.chunk_bytes) == 3 * manager.chunk_bytes
        assert manager.match_prefix(prompt(1, 6)) == 3 * CHUNK_TOKENS


def test_a_shortage_of_the_system_keeps_no_chunk_that_it_created() -> None:
    chunk_bytes = CHUNK_TOKENS * SPEC.bytes_per_token
    with VTensorManager(
        SPEC,
        "sim",
        chunk_bytes=chunk_bytes,
        memory_budget=64 * chunk_bytes,
        sim=SimConfig(capacity=8 * chunk_bytes),
    ) as manager:
        vtensor = manager.create()
        vtensor.extend(2 * CHUNK_TOKENS)
        assert not vtensor.try_extend(20 * CHUNK_TOKENS)
        assert manager.resident_bytes == 2 * chunk_bytes


def pre_extend_seconds(num_rows: int) -> float:
    """CPU time of pre-extending 8 vTensors by a row beside 8 parked slots of `num_rows`."""
    spec = KVSpec(4, 1, 128, "float32", max_seq_len=1 << 16)
    row_tokens = 4096 // spec.plane_token_bytes or 1
    with VTensorManager(
        spec, "sim", max_requests=16, chunk_bytes=4096, memory_budget=16 * (num_rows + 64) * 8192
    ) as manager:
        live = [manager.create() for _ in range(8)]
        for name in range(8):
            tokens = array("i", [name] * (num_rows * row_tokens))
            cached = manager.create(tokens)
            cached.extend(len(tokens))
            cached.record_prefix(tokens)
            cached.release()
        times = []
        for row in range(1, 11):
            start = time.process_time()  # of all threads, whatever else runs on their cores
            manager.pre_extend(live, [row * row_tokens] * 8)
            manager.drain()
            times.append(time.process_time() - start)
        return min(times)


def test_mapping_ahead_costs_the_same_beside_many_parked_chunks() -> None:
    assert pre_extend_seconds(16_000) < 10 * pre_extend_seconds(16)  # it was 300 times as long


@pytest.mark.parametrize("ttl_s", [0, -1, -0.5, float("nan"), float("-inf")])
def test_a_pin_that_has_expired_is_refused(ttl_s: float) -> None:
    with open_manager(4) as manager:
        serve(manager, prompt(1, 2))
        with pytest.raises(ValueError, match="ttl_s must be a positive number of seconds"):
            manager.pin_prefix(prompt(1, 2), "owner", ttl_s)
        assert manager.unpin_prefix("owner") == 0


@pytest.mark.parametrize("ttl_s", [float("inf"), 1e30])
def test_a_pin_for_good_does_not_expire(ttl_s: float) -> None:
    with open_manager(4) as manager:
        serve(manager, prompt(1, 2))
        assert manager.pin_prefix(prompt(1, 2), "owner", ttl_s) == 2 * CHUNK_TOKENS
        manager.reset_prefix_cache()
        assert manager.match_prefix(prompt(1, 2)) == 2 * CHUNK_TOKENS
