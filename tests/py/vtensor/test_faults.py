"""Driver failures as Python sees them: the k-th call fails, for every k of a scenario.

C++ does the same with every kind of failure (tests/cpp/core/fault_test.cpp); here it is about the
error classes, their attributes, and a manager that goes on working.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from flexinfer import _vtensor, _vtensor_testing
from flexinfer.errors import DriverError, OutOfMemoryError, VTensorError
from flexinfer.vtensor import KVGroup, KVSpec, StateGroup, StateTensor, VTensorManager
from helpers import device_param as kv_device

pytestmark = pytest.mark.usefixtures("kv_device")

CHUNK = 4096
SPEC = KVSpec(num_layers=2, num_kv_heads=2, head_dim=32, max_seq_len=64, layers_per_plane=1)
PROMPT = list(range(40))
GROUPS = KVSpec.of_groups(
    [
        KVGroup((0,), 2, 32, 32, layers_per_plane=1),
        KVGroup((1, 2, 3), 1, 32, 32, window=12, layers_per_plane=4),  # with room for a layer
        StateGroup((StateTensor(4, "recurrent", (30, 40), "float32", 4),)),
    ],
    max_seq_len=64,
)
"""A layer that keeps all, windows that move, and a state."""


class FaultyManager(VTensorManager):
    """A manager whose driver fails on demand, by ``manager.faults``."""

    faults: _vtensor_testing.FaultInjector

    def _open(
        self, driver: _vtensor.DriverConfig, options: _vtensor.ManagerOptions
    ) -> _vtensor.Manager:
        self.faults = _vtensor_testing.inject_faults(driver)
        return super()._open(driver, options)


def open_manager(spec: KVSpec = SPEC, **options: Any) -> FaultyManager:
    defaults: dict[str, Any] = {"max_requests": 4, "memory_budget": 64 * CHUNK}
    return FaultyManager(spec, chunk_bytes=CHUNK, **{**defaults, **kv_device.options(), **options})


def test_a_driver_error_names_call_code_and_arguments() -> None:
    with open_manager() as manager:
        vtensor = manager.create()
        manager.faults.fail(1)
        with pytest.raises(DriverError) as caught:
            vtensor.extend(4)
        error = caught.value
        assert (error.call, error.code_name) == ("create", "EIO")
        assert error.code == 5
        assert isinstance(error.arguments, str)
        assert "injected fault" in str(error)


def test_a_failed_extend_changes_nothing_and_may_be_repeated() -> None:
    with open_manager() as manager:
        vtensor = manager.create()
        vtensor.extend(16)
        vtensor.k(0)[:] = 3
        manager.faults.fail(6)
        with pytest.raises(DriverError):
            vtensor.extend(32)
        assert (vtensor.num_tokens, vtensor.mapped_tokens) == (16, 16)
        vtensor.extend(32)
        assert (vtensor.k(0)[:16] == 3).all()


def test_a_driver_without_memory_is_shortage() -> None:
    """The budget promised more than the machine has."""
    with open_manager() as manager:
        vtensor = manager.create()
        manager.faults.fail(1, out_of_memory=True, persistent=True)
        assert not vtensor.try_extend(4)
        with pytest.raises(OutOfMemoryError, match="injected fault"):
            vtensor.extend(4)
        manager.check_integrity()


def test_broken_slots_are_counted_and_named_and_repaired_when_the_driver_recovers() -> None:
    with open_manager(park=False) as manager:
        for _ in range(4):
            vtensor = manager.create()
            vtensor.extend(16)
            manager.faults.fail(2, persistent=True)  # one plane is unmapped, and no more
            vtensor.release()
            manager.faults.fail(0)
        stats = manager.stats()
        assert (stats.num_broken_slots, stats.num_free_slots) == (4, 0)
        assert stats.broken_bytes == stats.resident_bytes > 0
        assert [info.state for info in manager.snapshot().vtensors] == ["broken"] * 4
        manager.faults.fail(1, persistent=True)
        with pytest.raises(OutOfMemoryError, match="cannot unmap 4 that failed before"):
            manager.create()
        manager.faults.fail(0)
        vtensor = manager.create()
        vtensor.extend(16)
        assert not vtensor.k(0).any()
        manager.trim()
        stats = manager.stats()
        assert (stats.num_broken_slots, stats.num_vtensors, stats.num_free_slots) == (0, 1, 3)
        manager.check_integrity()


def test_a_driver_without_memory_makes_the_cache_give_way() -> None:
    with open_manager() as manager:
        first = manager.create(PROMPT)
        first.extend(40)
        first.record_prefix(PROMPT)
        first.release()
        manager.trim()
        manager.faults.fail(1, out_of_memory=True)
        manager.create([99]).extend(16)
        assert manager.match_prefix(PROMPT) < 40


def test_a_failure_of_the_worker_is_counted_and_harms_nobody() -> None:
    with open_manager() as manager:
        vtensor = manager.create()
        manager.faults.fail(1, persistent=True)
        manager.pre_extend([vtensor], [8])
        manager.drain()
        manager.faults.fail(0)
        assert manager.stats().pre_extend_failures == 1
        vtensor.extend(8)


def test_a_trim_that_fails_may_be_repeated() -> None:
    with open_manager() as manager:
        manager.create(PROMPT).extend(40)
        manager.faults.fail(3)
        with pytest.raises(DriverError):
            manager.trim()
        manager.check_integrity()
        manager.trim()
        assert manager.stats().resident_bytes == 0


def test_a_close_that_fails_may_be_repeated() -> None:
    manager = open_manager()
    vtensor = manager.create(PROMPT)
    vtensor.extend(40)
    manager.faults.fail(1, persistent=True)
    with pytest.raises(DriverError):
        manager.close()
    manager.faults.fail(0)
    manager.close()
    assert manager.stats().resident_bytes == 0


def serve(manager: FaultyManager, step: Callable[[Callable[[], Any]], Any]) -> None:
    """A request, its next turn and a fork, each operation through ``step``."""
    first = step(lambda: manager.create(PROMPT))
    if first is None:
        return
    step(lambda: first.extend(40))
    step(lambda: first.record_prefix(PROMPT[: first.num_tokens]))
    second = step(lambda: manager.create(PROMPT))
    child = step(lambda: first.fork())
    serve_state(manager, step)
    vtensors = [vtensor for vtensor in (first, second, child) if vtensor is not None]
    for vtensor in vtensors:
        step(lambda vtensor=vtensor: vtensor.extend(vtensor.num_tokens + 1))
    step(lambda: manager.forget(vtensors, [vtensor.num_tokens for vtensor in vtensors]))
    step(manager.drain)
    last = vtensors[-1]
    keeps_all = not manager.spec.windows
    step(lambda: last.truncate(last.num_tokens // 3 if keeps_all else max(0, last.num_tokens - 1)))
    step(lambda: setattr(manager, "memory_budget", 40 * CHUNK))
    step(lambda: manager.evict(4 * CHUNK))
    step(first.release)
    step(manager.trim)
    third = step(lambda: manager.create(PROMPT))
    if third is not None:
        step(lambda: third.extend(50))


def serve_state(manager: FaultyManager, step: Callable[[Callable[[], Any]], Any]) -> None:
    """A recurrent state, a snapshot of it, and what goes on from there."""
    length = manager.spec.state.num_tokens
    state = step(lambda: manager.create()) if length else None
    if state is None:
        return
    step(lambda: state.extend(length))
    snapshot = list(range(-length, 0))
    step(lambda: state.record_prefix(snapshot[: state.num_tokens]))
    step(state.release)
    found = step(lambda: manager.create(snapshot))
    if found is not None:
        step(found.release)


CASES = {
    **{f"one group {case}": (SPEC, *case) for case in product([False, True], repeat=3)},
    **{f"groups {case}": (GROUPS, False, *case) for case in [(False, True), (True, False)]},
}


@pytest.mark.parametrize(
    ("spec", "out_of_memory", "persistent", "park"), CASES.values(), ids=CASES.keys()
)
def test_every_call_may_fail(
    spec: KVSpec, out_of_memory: bool, persistent: bool, park: bool
) -> None:
    with open_manager(spec, park=park) as manager:
        before = manager.faults.num_calls()
        serve(manager, lambda operation: operation())
        num_calls = manager.faults.num_calls() - before
        assert bool(spec.windows) == (manager.stats().chunks_given_back > 0)

    for k in range(1, num_calls + 1):
        manager = open_manager(spec, park=park)

        def step(operation: Callable[[], Any], manager: FaultyManager = manager) -> Any:
            try:
                return operation()
            except VTensorError:
                return None
            finally:
                manager.check_integrity()

        manager.faults.fail(k, out_of_memory=out_of_memory, persistent=persistent)
        serve(manager, step)
        assert manager.faults.num_failed() > 0
        manager.faults.fail(0)
        broken = [v for v in manager.snapshot().vtensors if v.state == "broken"]
        manager.close()
        if not broken:
            assert manager.stats().resident_bytes == 0
