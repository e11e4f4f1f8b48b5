"""Operations recorded on one manager and done again on another leave both with the same books."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexinfer.distributed.operations import DisagreementError, Replica, record_operations
from flexinfer.distributed.token_table import MAX_ARRAYS, TokenTable, common_length
from flexinfer.errors import OutOfMemoryError
from flexinfer.vtensor import KVSpec, VTensor, VTensorManager

SPEC = KVSpec(num_layers=2, num_kv_heads=2, head_dim=16, max_seq_len=256)


def make_manager(budget: int = 40 * 4096) -> VTensorManager:
    return VTensorManager(
        SPEC,
        "sim",
        max_requests=6,
        memory_budget=budget,
        chunk_bytes=4096,
        min_free_bytes=4 * 4096,
        prefix_cache_bytes=12 * 4096,
        swap_space="1MiB",
    )


@pytest.mark.parametrize("seed", range(8))
def test_random_operations_with_a_busy_worker_leave_the_same_books(seed: int) -> None:
    rng = random.Random(seed)
    first, second = make_manager(), make_manager()
    recording, replica = record_operations(first), Replica(second._core)
    live: list[tuple[VTensor, list[int]]] = []
    for _ in range(400):
        operate(rng, first, live)
        if rng.random() < 0.2:
            for operation in recording.take():
                replica.apply(operation)
            replica.check(recording.books())
    first.close()
    second.close()


def operate(
    rng: random.Random, manager: VTensorManager, live: list[tuple[VTensor, list[int]]]
) -> None:
    tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 200))]
    kind = rng.randrange(9)
    if kind == 0 or not live:
        vtensor = manager.try_create(tokens)
        if vtensor is not None and vtensor.try_extend(len(tokens)):
            live.append((vtensor, tokens))
        return
    vtensor, tokens = rng.choice(live)
    if kind == 1:
        manager.pre_extend([vtensor], [min(256, len(tokens) + 64)])
    elif kind == 2:
        vtensor.record_prefix(tokens)
    elif kind in (3, 4):
        live.remove((vtensor, tokens))  # collected: releases itself
    elif kind == 5 and vtensor.try_swap_out() and not vtensor.try_swap_in(tokens):
        live.remove((vtensor, tokens))
    elif kind == 6:
        manager.pin_prefix(tokens, "owner", rng.choice([None, 0.001]))
    elif kind == 7:
        manager.unpin_prefix("owner")
        manager.pre_extend([], [])
    elif kind == 8:
        try:
            manager.memory_budget = rng.choice([30, 40]) * 4096
        except OutOfMemoryError:
            manager.evict(4096)


def test_another_outcome_is_noticed() -> None:
    first, second = make_manager(), make_manager(budget=2 * 4096)
    recording, replica = record_operations(first), Replica(second._core)
    vtensor = first.create()
    vtensor.extend(200)
    created, extended = recording.take()
    replica.apply(created)
    with pytest.raises(DisagreementError, match=r"extend gave 'raised OutOfMemoryError'"):
        replica.apply(extended)
    first.close()
    second.close()


def test_other_books_are_noticed() -> None:
    first, second = make_manager(), make_manager()
    recording, replica = record_operations(first), Replica(second._core)
    replica.check(recording.books())
    first.create().extend(3)
    with pytest.raises(DisagreementError, match="books"):
        replica.check(recording.books())
    first.close()
    second.close()


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 60), st.lists(st.integers(0, 1), max_size=9)),
        max_size=60,
    )
)
def test_token_arrays_come_out_as_they_went_in(
    arrays: list[tuple[int, int, list[int]]],
) -> None:
    writer, reader = TokenTable(), TokenTable()
    for seed, length, rest in arrays:
        tokens = array("i", [*([seed] * length), *rest]).tobytes()
        assert reader.decode(writer.encode(tokens)) == tokens


def test_what_both_sides_know_is_not_sent_again() -> None:
    writer = TokenTable()
    prompt = array("i", range(5000)).tobytes()
    assert len(writer.encode(prompt)[2]) == len(prompt)
    assert writer.encode(prompt)[2] == b""
    assert len(writer.encode(prompt + b"1234")[2]) == 4
    assert writer.encode(prompt[:4000])[2] == b""


def test_a_table_forgets_the_oldest_arrays_on_both_sides() -> None:
    writer, reader = TokenTable(), TokenTable()
    for i in range(2 * MAX_ARRAYS):
        tokens = array("i", [i] * 20).tobytes()
        assert reader.decode(writer.encode(tokens)) == tokens
    assert writer._arrays == reader._arrays
    assert len(writer._arrays) == MAX_ARRAYS


def test_the_common_length_is_that_of_the_equal_bytes() -> None:
    assert common_length(b"abcdef", b"abcxef") == 3
    assert common_length(b"abc", b"abcdef") == 3
    assert common_length(b"", b"x") == 0


def test_what_a_destructor_does_within_an_operation_is_done_and_recorded_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = make_manager()
    recording = record_operations(manager)
    vtensor = manager.create()
    perform = recording._performer.perform

    def collect_meanwhile(name: str, args: tuple[object, ...]) -> object:
        if name == "match_prefix":
            vtensor.release()
        return perform(name, args)

    monkeypatch.setattr(recording._performer, "perform", collect_meanwhile)
    manager.match_prefix([1, 2, 3])
    assert [name for name, _, _ in recording.take()] == ["try_create", "match_prefix", "release"]
    assert manager.num_free_slots == 6
    manager.close()
