"""Block events: who knows nothing but these knows which blocks are recorded."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexinfer.events.messages import message_of
from flexinfer.vtensor import KVGroup, KVSpec, VTensorManager
from helpers.block_subscriber import KnownBlocks

SALTS = ("", "tenant")
MAX_LEN = 200
CHUNK = 4096


def open_manager(spec: KVSpec | None = None) -> VTensorManager:
    """12.8 tokens a chunk, which 16 do not divide; room for some ten prompts."""
    spec = spec or KVSpec(1, 1, 40, "float32", MAX_LEN)
    sizes = {"memory_budget": 80 * CHUNK, "chunk_bytes": CHUNK}
    return VTensorManager(spec, "sim", max_requests=6, **sizes)


@pytest.fixture
def manager() -> Iterator[VTensorManager]:
    with open_manager() as opened:
        yield opened


def listen(manager: VTensorManager, known: KnownBlocks) -> KnownBlocks:
    for event in manager.take_block_events() or []:
        known.apply(message_of(event))
    return known


def record(manager: VTensorManager, tokens: list[int], salt: str = "") -> None:
    vtensor = manager.create(tokens, cache_salt=salt)
    vtensor.extend(len(tokens))
    vtensor.record_prefix(tokens)
    vtensor.release()


class RandomUser:
    """Prompts that meet and part often, inside of blocks and of rows."""

    def __init__(self, manager: VTensorManager, seed: int) -> None:
        self.manager = manager
        self.rng = random.Random(seed)
        self.prompts: list[list[int]] = [[]]

    def prompt(self) -> list[int]:
        rng = self.rng
        old = rng.choice(self.prompts[-40:])
        tokens = old[: rng.randint(0, len(old))]
        tokens = tokens + [rng.randrange(3) for _ in range(rng.randint(1, 60))]
        self.prompts.append(tokens[:MAX_LEN])
        return self.prompts[-1]

    def act(self) -> None:
        rng, manager = self.rng, self.manager
        salt = rng.choice(SALTS)
        match rng.randrange(24):
            case 0:
                manager.evict(rng.randrange(20) * CHUNK)
            case 1:
                manager.pin_prefix(rng.choice(self.prompts), rng.choice("ab"), None, salt)
            case 2 | 3:
                manager.unpin_prefix(rng.choice("ab"))
            case 4 if rng.random() < 0.2:
                manager.reset_prefix_cache()
            case 5:
                manager.match_prefix(rng.choice(self.prompts), cache_salt=salt)
            case 6 if rng.random() < 0.2:
                manager.sleep()
                manager.wake()
            case 7 if rng.random() < 0.1:
                manager.retell_blocks()
            case _:
                tokens = self.prompt()
                vtensor = manager.create(tokens, cache_salt=salt)
                if manager.try_extend([vtensor], [len(tokens)]):
                    vtensor.record_prefix(tokens[: rng.randint(1, len(tokens))])
                    vtensor.record_prefix(tokens)
                vtensor.release()


WITH_WINDOWS = KVSpec.of_groups((KVGroup((0,), 1, 40, 40, window=24),), MAX_LEN, 1)
SPECS = pytest.mark.parametrize("spec", [None, WITH_WINDOWS], ids=["full attention", "windows"])


def most_known(spec: KVSpec | None, seed: int, num_actions: int, actions_between: int) -> int:
    """Lets a user act and a listener hear of it now and then, who must know what is recorded;
    returns the most blocks that were known."""
    with open_manager(spec) as manager:
        user, known = RandomUser(manager, seed), KnownBlocks()
        manager.watch_blocks()
        most = 0
        for i in range(num_actions):
            user.act()
            if i % actions_between == 0 or i == num_actions - 1:
                listen(manager, known).check(manager)
                most = max(most, len(known.paths))
            if i % 500 == 0:
                manager.check_integrity()
        return most


@SPECS
@given(
    seed=st.integers(0, 2**32 - 1),
    num_actions=st.integers(1, 300),
    actions_between=st.integers(1, 50),
)
def test_who_hears_all_events_knows_what_is_recorded(
    spec: KVSpec | None, seed: int, num_actions: int, actions_between: int
) -> None:
    most_known(spec, seed, num_actions, actions_between)


@SPECS
def test_who_hears_of_10_000_actions_knows_what_is_recorded(spec: KVSpec | None) -> None:
    assert most_known(spec, seed=1, num_actions=10_000, actions_between=20) > 30


def test_what_is_recorded_already_is_told_first(manager: VTensorManager) -> None:
    user = RandomUser(manager, seed=2)
    for _ in range(200):
        user.act()
    manager.watch_blocks()
    known = listen(manager, KnownBlocks())
    assert known.paths
    known.check(manager)


def test_equal_beginnings_have_equal_hashes_on_every_manager_and_other_ones_by_salt() -> None:
    hashes = []
    for salt in ("", "", "tenant"):
        with open_manager() as manager:
            record(manager, [9] * 16, salt)  # one in two steps, so that nodes are cut elsewhere
            manager.watch_blocks()
            record(manager, [9] * 50, salt)
            events = [message_of(event) for event in manager.take_block_events() or []]
            hashes.append(
                [b for e in events if e["type"] == "BlockStored" for b in e["block_hashes"]]
            )
    assert len(set(hashes[0])) == 3
    assert hashes[0] == hashes[1]
    assert not set(hashes[0]) & set(hashes[2])


def test_forgetting_everything_is_one_event(manager: VTensorManager) -> None:
    manager.watch_blocks()
    record(manager, [1] * 100)
    manager.reset_prefix_cache()
    events = manager.take_block_events()
    assert events is not None
    assert [event.kind.name for event in events] == ["CLEARED"]


def test_pinned_blocks_outlive_a_reset(manager: VTensorManager) -> None:
    manager.watch_blocks()
    record(manager, [1] * 100)
    manager.pin_prefix([1] * 40, "owner")
    manager.reset_prefix_cache()
    known = listen(manager, KnownBlocks())
    assert [len(tokens) for _, tokens in known.paths.values()] == [16, 32]
    known.check(manager)


def test_a_log_that_nobody_reads_is_dropped_and_told_anew(manager: VTensorManager) -> None:
    known = KnownBlocks()
    manager.watch_blocks()
    prompts = [[i] * MAX_LEN for i in range(40)]
    record(manager, prompts[0])
    listen(manager, known)
    num_events = 0
    for _ in range(600):  # of more than 4 million tokens
        for tokens in prompts:
            record(manager, tokens)
    for event in manager.take_block_events() or []:
        num_events += 1
        known.apply(message_of(event))
    assert num_events < 100
    known.check(manager)


def test_a_closed_manager_ends_the_waiting(manager: VTensorManager) -> None:
    manager.watch_blocks()
    assert manager.take_block_events() != []
    assert manager.take_block_events() == []
    record(manager, [1] * 16)
    manager.close()
    assert [e.kind.name for e in manager.take_block_events(timeout_s=60) or []] == ["STORED"]
    assert manager.take_block_events(timeout_s=60) is None


def test_who_does_not_watch_hears_nothing(manager: VTensorManager) -> None:
    record(manager, [1] * 100)
    assert manager.take_block_events(timeout_s=60) is None
    assert [prefix.blocks for prefix in manager.snapshot().prefixes] == [[]]
