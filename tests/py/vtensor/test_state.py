"""Recurrent states in vTensors of their own: where they lie, how they are recorded and found."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flexinfer.scheduler.snapshots import Snapshots
from flexinfer.vtensor import (
    KVGroup,
    KVSpec,
    StateGroup,
    StateLayout,
    StateTensor,
    VTensor,
    VTensorManager,
)

CHUNK = 4096
CONV = StateTensor(0, "conv", (24, 4), "float32", 4)
MATRIX = StateTensor(2, "recurrent", (4, 16, 32), "float32", 4)
SPECS = {
    "interleaved": KVSpec(4, 2, 16, max_seq_len=256),
    "dense": KVSpec(4, 2, 16, max_seq_len=256, layers_per_plane=1),
    "beside a window": KVSpec.of_groups(
        [KVGroup((1,), 2, 16, 16, window=8), KVGroup((3, 5), 1, 48, 0)], max_seq_len=256
    ),
}


def open_manager(spec: KVSpec, **options: Any) -> VTensorManager:
    settings = {"max_requests": 8, "memory_budget": 200 * CHUNK, "chunk_bytes": CHUNK, **options}
    return VTensorManager(spec, from_dlpack=np.from_dlpack, **settings)


def write(vtensor: VTensor, spec: KVSpec, layout: StateLayout, number: float) -> None:
    """All bytes that the state may have."""
    for plane in {place.plane for place in layout.places}:
        getattr(vtensor, plane.which)(plane.layer)[: layout.num_tokens] = number


def read(vtensor: VTensor, layout: StateLayout) -> set[float]:
    planes = {place.plane for place in layout.places}
    views = [getattr(vtensor, plane.which)(plane.layer)[: layout.num_tokens] for plane in planes]
    return {float(number) for view in views for number in np.unique(view)}


@pytest.mark.parametrize("name", SPECS)
def test_tensors_lie_apart_within_the_tokens_of_planes_that_keep_all(name: str) -> None:
    spec = SPECS[name]
    tensors = [CONV, MATRIX, StateTensor(3, "conv", (5,), "bfloat16", 2), MATRIX]
    spec = KVSpec.of_groups([*spec.groups, StateGroup(tuple(tensors))], 256)
    layout = spec.state
    ends: dict[Any, int] = {}
    for tensor, place in zip(layout.tensors, layout.places, strict=True):
        assert place.offset_bytes % 64 == 0
        assert place.offset_bytes >= ends.get(place.plane, 0)
        ends[place.plane] = place.offset_bytes + tensor.num_bytes
        assert ends[place.plane] <= layout.num_tokens * place.plane.token_bytes
        assert spec.group_of(place.plane.layer).window is None
    with open_manager(spec) as manager:
        for plane in ends:
            arena = getattr(manager, plane.which)(plane.layer)
            assert arena.strides[1] == plane.token_bytes
            base = manager.k(plane.layer).__array_interface__["data"][0]
            assert (base % CHUNK == 0) or plane.which == "v"
        vtensor = manager.create()
        vtensor.extend(layout.num_tokens)
        assert vtensor.info().mapped_bytes == spec.state_bytes(manager.chunk_bytes)
    if name == "interleaved":
        assert spec.state_bytes(CHUNK) > spec.row_chunks * CHUNK, "more than one row"


def test_a_model_of_windows_alone_has_no_place_for_a_state() -> None:
    near = KVGroup((0,), 1, 8, 8, window=4)
    with pytest.raises(ValueError, match="each layer of this model has a window"):
        KVSpec.of_groups([near, StateGroup((CONV,))])
    assert KVSpec.of_groups([near]).state.num_tokens == 0


def test_a_spec_has_groups_of_each_retention() -> None:
    """A layer may keep both, as Falcon-H1's do."""
    kv = [KVGroup((0, 2), 2, 16, 16), KVGroup((1,), 2, 16, 16, window=8)]
    states = StateGroup((MATRIX, CONV))
    assert [group.retention for group in (*kv, states)] == ["full", "window", "state"]
    assert states.layers == (0, 2)
    spec = KVSpec.of_groups([*kv, states], num_layers=3)
    assert spec.groups == tuple(kv)
    assert spec.state.tensors == spec.states == (MATRIX, CONV)
    assert spec.state_bytes(CHUNK) % (spec.row_chunks * CHUNK) == 0 < spec.state_bytes(CHUNK)


LARGE = StateTensor(0, "conv", (9**5,), "uint8", 1)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([StateGroup((CONV,))], "at least one group of layers"),
        (
            [KVGroup((1,), 2, 16, 16), StateGroup((CONV,)), StateGroup((CONV,))],
            "layer 0 stands in the groups of states twice",
        ),
        ([KVGroup((1,), 2, 16, 16), StateGroup((CONV,))], "layer 2 is missing"),
        (
            [KVGroup((1, 2), 2, 16, 16), StateGroup((LARGE,))],
            "takes the room of 116 tokens, more than max_seq_len 100",
        ),
    ],
)
def test_states_that_do_not_fit_are_refused(groups: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVSpec.of_groups(groups, 100, num_layers=3)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ((), "at least one tensor"),
        ((StateTensor(-1, "conv", (2,), "float32", 4),), "a layer must be an integer of at least"),
        ((StateTensor(1, "conv", (2, 0), "float32", 4),), "the state of layer 1 has no bytes"),
    ],
)
def test_a_group_of_states_that_makes_no_sense_is_refused(
    tensors: tuple[StateTensor, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        StateGroup(tensors)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("seed", range(2))
def test_a_snapshot_is_found_whole_or_not_at_all(name: str, seed: int) -> None:
    """Against a dictionary, with a budget that evicts, swapping and sleeping in between."""
    rng = random.Random(f"{name} {seed}")
    spec = replace(SPECS[name], states=(CONV, MATRIX))
    layout, state_bytes = spec.state, spec.state_bytes(CHUNK)
    with open_manager(spec, memory_budget=6 * state_bytes, swap_space=4 * state_bytes) as manager:
        snapshots = Snapshots(manager, layout.num_tokens, max_count=6)
        written: dict[tuple[str, tuple[int, ...]], float] = {}
        text = [rng.randrange(3) for _ in range(40)]
        num_hits = 0
        for step in range(60):
            salt = rng.choice(["", "a"])
            tokens = array("i", text[: rng.randrange(1, 40)])
            if rng.random() < 0.2:
                tokens[-1] = 7
            action = rng.random()
            if action < 0.5:
                state = manager.create(cache_salt=salt)
                state.extend(layout.num_tokens)
                write(state, spec, layout, step)
                if rng.random() < 0.3:
                    assert state.try_swap_out()
                    assert state.try_swap_in()
                if snapshots.add(tokens, salt, state):
                    written[salt, tuple(tokens)] = step
                state.release()
            elif action < 0.9:
                limit = rng.randrange(41)
                length = snapshots.longest(tokens, salt, limit)
                assert length <= min(limit, len(tokens))
                if length:
                    num_hits += 1
                    found = snapshots.open(tokens[:length], salt)
                    assert found is not None
                    assert found.num_cached_tokens == layout.num_tokens
                    assert read(found, layout) == {written[salt, tuple(tokens[:length])]}
                    found.release()
            elif rng.random() < 0.5:
                manager.sleep()
                manager.wake()
            else:
                manager.evict(state_bytes // 2)
            manager.check_integrity()
            assert len(snapshots) <= 6
        assert num_hits > 3


def test_no_prompt_finds_a_state() -> None:
    """The numbers under which it is recorded are below 0, as no token is."""
    spec = replace(SPECS["interleaved"], states=(CONV,))
    layout = spec.state
    with open_manager(spec) as manager:
        snapshots = Snapshots(manager, layout.num_tokens, max_count=6)
        state = manager.create()
        state.extend(layout.num_tokens)
        snapshots.add(array("i", [1, 2, 3]), "", state)
        (prefix,) = manager.snapshot().prefixes
        assert all(token < 0 for token in prefix.first_tokens)
        assert snapshots.open(array("i", [1, 2, 3]), "") is not None
        stats = manager.stats()
        assert stats.prefix_queries == stats.prefix_hit_tokens == 0, "prompts alone are counted"
        assert snapshots.longest(array("i", [1, 2, 3, 4]), "", 4) == 3
        assert snapshots.longest(array("i", [1, 2, 3, 4]), "", 2) == 0
        assert snapshots.longest(array("i", [1, 2, 4, 4]), "", 4) == 0


def test_a_pinned_prefix_keeps_its_last_state() -> None:
    spec = replace(SPECS["interleaved"], states=(CONV,))
    layout = spec.state
    tokens = array("i", range(20))
    with open_manager(spec) as manager:
        snapshots = Snapshots(manager, layout.num_tokens, max_count=6)
        for length in (10, 20):
            state = manager.create()
            state.extend(layout.num_tokens)
            snapshots.add(tokens[:length], "", state)
            state.release()
        kv = manager.create()
        kv.extend(15)
        kv.record_prefix(tokens[:15])
        kv.release()
        assert snapshots.pin_prefix(tokens, "me", None, "") == 15
        manager.reset_prefix_cache()
        assert (snapshots.longest(tokens, "", 20), len(snapshots)) == (10, 1)
        assert manager.unpin_prefix("me") == 2
