"""The index of prefixes against a plain model, and what each router is for."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexinfer.routing.blocks import BLOCK_TOKENS, hash_blocks
from flexinfer.routing.prefix_index import PrefixIndex
from flexinfer.routing.routers import ROUTERS, ReplicaLoad, RoutedPrompt, Router

NUM_REPLICAS = 4


def prompt_of(tokens: list[int]) -> RoutedPrompt:
    return RoutedPrompt(len(tokens), hash_blocks(tokens))


def make_router(name: str, seed: int = 0, max_blocks: int = 1000) -> Router:
    return ROUTERS[name](PrefixIndex(max_blocks), seed)


def idle() -> dict[int, ReplicaLoad]:
    return {number: ReplicaLoad() for number in range(NUM_REPLICAS)}


@given(st.lists(st.integers(0, 1), max_size=70), st.lists(st.integers(0, 1), max_size=70))
def test_equal_hashes_are_equal_beginnings(a: list[int], b: list[int]) -> None:
    same = sum(
        a[:end] == b[:end] for end in range(BLOCK_TOKENS, min(len(a), len(b)) + 1, BLOCK_TOKENS)
    )
    pairs = zip(hash_blocks(a), hash_blocks(b), strict=False)
    assert sum(x == y for x, y in pairs) == same
    assert not set(hash_blocks(a, "tenant")) & set(hash_blocks(a))


@given(
    st.integers(1, 12),
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(0, 5), st.booleans()),
        max_size=40,
    ),
)
def test_the_index_is_an_lru_of_each_replica(
    max_blocks: int, steps: list[tuple[int, int, int, bool]]
) -> None:
    """Prompts are (text, length); blocks of two texts differ from the second on."""
    index = PrefixIndex(max_blocks)
    recent: list[list[tuple[int, int]]] = [[], []]  # the least recent first
    for replica, text, length, is_lost in steps:
        blocks = [(0, 0), *((text, place) for place in range(1, length))][:length]
        index.add(replica, [hash(block) for block in blocks])
        for block in reversed(blocks):
            if block in recent[replica]:
                recent[replica].remove(block)
            recent[replica].append(block)
        del recent[replica][: max(0, len(recent[replica]) - max_blocks)]
        if is_lost:
            index.clear(1 - replica)
            recent[1 - replica].clear()
        expected = {}
        for number, cached in enumerate(recent):
            match = 0
            while match < length and blocks[match] in cached:
                match += 1
            if match:
                expected[number] = match
            assert index.num_blocks(number) == len(cached)
        assert index.matches([hash(block) for block in blocks]) == expected


def test_round_robin_takes_each_in_turn() -> None:
    router = make_router("round-robin")
    assert [router.choose(prompt_of([1]), idle()) for _ in range(6)] == [0, 1, 2, 3, 0, 1]


def test_power_of_two_never_takes_the_busiest() -> None:
    loads = {r: ReplicaLoad(num_requests=n) for r, n in enumerate((1, 9, 2, 3))}
    taken = Counter(make_router("power-of-two", s).choose(prompt_of([1]), loads) for s in range(99))
    assert set(taken) == {0, 2, 3}
    assert taken[0] > taken[2] > taken[3]


@pytest.mark.parametrize("name", ["prefix-affinity", "cached-prefix"])
def test_a_cached_prefix_attracts(name: str) -> None:
    router = make_router(name)
    prompt = prompt_of(list(range(320)))
    router.index.add(2, prompt.blocks)
    assert router.choose(prompt, idle()) == 2
    assert {make_router(name, s).choose(prompt, idle()) for s in range(40)} == {0, 1, 2, 3}


@pytest.mark.parametrize(("num_waiting_tokens", "stays"), [(600, True), (6000, False)])
def test_a_prefix_gets_a_second_home_when_the_first_is_too_busy(
    num_waiting_tokens: int, stays: bool
) -> None:
    router = make_router("cached-prefix")
    prompt = prompt_of(list(range(320)))
    router.index.add(2, prompt.blocks)
    loads = idle()
    loads[2] = ReplicaLoad(1, num_waiting_tokens)
    assert (router.choose(prompt, loads) == 2) == stays


def test_prefix_affinity_gives_way_to_load() -> None:
    router = make_router("prefix-affinity")
    prompt = prompt_of(list(range(320)))
    router.index.add(2, prompt.blocks)
    loads = idle()
    loads[2] = ReplicaLoad(num_requests=33)
    assert router.choose(prompt, loads) != 2


def test_prefix_affinity_without_a_match_takes_who_has_least() -> None:
    router = make_router("prefix-affinity")
    for replica in (0, 1, 3):
        router.index.add(replica, prompt_of([replica] * 32).blocks)
    assert router.choose(prompt_of(list(range(1000, 1320))), idle()) == 2
