"""The KV pool and torch's allocator give way to each other, and no output changes by it."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer import LLMEngine, OutOfMemoryError, SamplingParams, _vtensor, _vtensor_testing
from flexinfer.memory import torch_share
from flexinfer.memory.torch_share import TorchMemory, on_torch_out_of_memory, watch
from flexinfer.runner.plan import StepPlan, StepResult
from flexinfer.vtensor import KVSpec, SimConfig, VTensorManager
from helpers.engine_kit import make_engine, run
from helpers.tiny_models import random_prompts, reference

SPEC = KVSpec(num_layers=2, num_kv_heads=1, head_dim=16, max_seq_len=1024)
CHUNK = 4096
TOKENS_PER_CHUNK = 16
MIB = 1 << 20


class HoldingAllocator:
    """Holds memory of the simulated device that the pool could use."""

    def __init__(self, cached_bytes: int) -> None:
        self._cached_bytes = cached_bytes
        self.num_calls = 0

    def cached_bytes(self) -> int:
        return self._cached_bytes

    def empty_cache(self) -> None:
        self.num_calls += 1
        self._cached_bytes = 0


def make_manager(capacity: int | None = None, budget: int = 64 * CHUNK) -> VTensorManager:
    return VTensorManager(
        SPEC,
        "sim",
        max_requests=8,
        memory_budget=budget,
        chunk_bytes=CHUNK,
        pre_extend=False,
        sim=SimConfig(capacity=capacity),
    )


def test_when_the_device_is_short_of_what_the_budget_allows_torch_is_asked() -> None:
    asked = []
    with make_manager(capacity=4 * CHUNK) as manager:
        manager.on_shortage = lambda: bool(asked.append(manager.resident_bytes))
        request = manager.create()
        assert not request.try_extend(5 * TOKENS_PER_CHUNK)
        with pytest.raises(OutOfMemoryError):
            manager.extend([request], [6 * TOKENS_PER_CHUNK])
        assert len(asked) == 2
        manager.check_integrity()


def test_a_shortage_of_the_budget_does_not_trouble_torch() -> None:
    with make_manager(budget=4 * CHUNK) as manager:
        manager.on_shortage = lambda: pytest.fail("torch was asked")
        request = manager.create()
        assert request.try_extend(4 * TOKENS_PER_CHUNK)
        assert not request.try_extend(5 * TOKENS_PER_CHUNK)


class FullDevice(VTensorManager):
    """Its device gives no memory until it `is_free`."""

    faults: _vtensor_testing.FaultInjector

    def _open(
        self, driver: _vtensor.DriverConfig, options: _vtensor.ManagerOptions
    ) -> _vtensor.Manager:
        self.faults = _vtensor_testing.inject_faults(driver)
        manager = super()._open(driver, options)
        self.faults.fail(1, out_of_memory=True, persistent=True)
        return manager

    def free(self) -> bool:
        self.faults.fail(0)
        return True


@pytest.mark.parametrize("call", ["extend", "try_extend", "extend one", "try_extend one"])
def test_what_torch_gives_back_is_used_at_once(call: str) -> None:
    options: Any = {"max_requests": 2, "memory_budget": 8 * CHUNK, "chunk_bytes": CHUNK}
    with FullDevice(SPEC, "sim", pre_extend=False, **options) as manager:
        request = manager.create()
        assert not request.try_extend(TOKENS_PER_CHUNK)
        manager.on_shortage = manager.free
        name, _, one = call.partition(" ")
        if one:
            getattr(request, name)(2 * TOKENS_PER_CHUNK)
        else:
            getattr(manager, name)([request], [2 * TOKENS_PER_CHUNK])
        assert request.num_tokens == 2 * TOKENS_PER_CHUNK
        manager.check_integrity()


def test_only_a_call_that_can_gain_something_is_tried_again() -> None:
    with make_manager() as manager:
        little = HoldingAllocator(MIB)
        assert not TorchMemory(manager, little).give_to_pool()
        assert little.num_calls == 0
        much = HoldingAllocator(64 * MIB)
        memory = TorchMemory(manager, much)
        assert memory.give_to_pool()
        assert not memory.give_to_pool()
        assert much.num_calls == 1


def record(manager: VTensorManager, first_token: int, num_tokens: int) -> None:
    request = manager.create()
    request.extend(num_tokens)
    request.record_prefix(range(first_token, first_token + num_tokens))
    request.release()


def test_the_pool_gives_free_chunks_before_prefixes() -> None:
    with make_manager() as manager:
        memory = TorchMemory(manager, HoldingAllocator(0))
        record(manager, 0, 4 * TOKENS_PER_CHUNK)
        request = manager.create()
        request.extend(3 * TOKENS_PER_CHUNK)
        request.release()
        assert memory.give_to_torch(3 * CHUNK) == 3 * CHUNK
        assert manager.match_prefix(range(4 * TOKENS_PER_CHUNK)) == 4 * TOKENS_PER_CHUNK
        assert memory.give_to_torch(2 * CHUNK) == 2 * CHUNK
        assert manager.match_prefix(range(4 * TOKENS_PER_CHUNK)) == 2 * TOKENS_PER_CHUNK
        manager.check_integrity()


def test_what_is_in_use_is_not_given() -> None:
    with make_manager() as manager:
        request = manager.create()
        request.extend(3 * TOKENS_PER_CHUNK)
        assert TorchMemory(manager, HoldingAllocator(0)).give_to_torch(MIB) == 0
        assert manager.resident_bytes == 3 * CHUNK


def test_a_sleeping_or_closed_pool_has_nothing_to_give() -> None:
    manager = make_manager()
    memory = TorchMemory(manager, HoldingAllocator(0))
    manager.sleep()
    assert memory.give_to_torch(MIB) == 0
    manager.wake()
    manager.close()
    assert memory.give_to_torch(MIB) == 0


def test_torchs_observer_reaches_the_pools_of_its_device_and_no_dead_ones() -> None:
    managers = [make_manager() for _ in range(3)]
    memories = [TorchMemory(manager, HoldingAllocator(0)) for manager in managers]
    for manager, memory, device_index in zip(managers, memories, (7, 8, 7), strict=True):
        record(manager, 0, 2 * TOKENS_PER_CHUNK)
        watch(device_index, memory)
    del memories[2], memory
    gc.collect()
    on_torch_out_of_memory(7, CHUNK, 80 * MIB, 0)
    assert [manager.resident_bytes // CHUNK for manager in managers] == [1, 2, 2]


def test_nothing_leaves_the_observer(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(TorchMemory):
        def give_to_torch(self, num_bytes: int) -> int:
            raise RuntimeError("the driver is gone")

    with make_manager() as manager, caplog.at_level(logging.ERROR):
        broken = Broken(manager, HoldingAllocator(0))
        watch(9, broken)
        on_torch_out_of_memory(9, CHUNK, 80 * MIB, 0)
    assert "could not give memory back" in caplog.text


@pytest.mark.parametrize(("has_driver", "num_attached"), [(True, 1), (False, 0)])
def test_the_observer_is_attached_once_and_only_where_there_is_a_driver(
    has_driver: bool, num_attached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    attached: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_driver)
    monkeypatch.setattr(
        torch._C, "_cuda_attach_out_of_memory_observer", attached.append, raising=False
    )
    torch_share._attach_observer.cache_clear()
    with make_manager() as manager:
        memories = [TorchMemory(manager, HoldingAllocator(0)) for _ in range(2)]
        for memory in memories:
            watch(3, memory)
    torch_share._attach_observer.cache_clear()
    assert attached == [on_torch_out_of_memory] * num_attached


@pytest.mark.parametrize(
    ("error", "is_shortage"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("CUDA error: out of memory\nhint"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("CUDA error: out of memory"), False),
        (MemoryError("out of memory"), False),
    ],
)
def test_which_errors_are_a_shortage(error: Exception, is_shortage: bool) -> None:
    assert TorchMemory.is_shortage(error) == is_shortage


# The engine.


class SmallGpu:
    """A runner that finds memory for the activations of `max_requests` requests only."""

    def __init__(self, engine: LLMEngine, max_requests: int, num_failures: int = 10**9) -> None:
        self._execute = engine.runner.execute
        self.max_requests = max_requests
        self.num_failures = num_failures
        engine.runner.execute = self.execute  # type: ignore[method-assign]

    def execute(self, plan: StepPlan) -> StepResult:
        if len(plan.slots) > self.max_requests and self.num_failures > 0:
            self.num_failures -= 1
            if len(plan.slots) > 1:
                self._execute(plan)  # the work was done, and is lost
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self._execute(plan)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_step_without_memory_for_activations_runs_with_fewer_requests(mode: str) -> None:
    engine = make_engine(preemption_mode=mode, swap_space="4MiB")
    SmallGpu(engine, max_requests=2)
    prompts = random_prompts((9, 4, 17, 6, 11), seed=3)
    final = run(engine, prompts, num_new=8)
    for i, prompt in enumerate(prompts):
        assert final[str(i)].outputs[0].token_ids == reference("llama", tuple(prompt), 8)
    reasons = engine.stats().preemptions[mode]
    assert any(reason.startswith("activations") for reason in reasons)
    engine.close()


def test_a_step_that_works_at_the_second_try_preempts_nobody() -> None:
    engine = make_engine()
    SmallGpu(engine, max_requests=0, num_failures=1)
    prompts = random_prompts((9, 4, 17), seed=4)
    final = run(engine, prompts, num_new=6)
    for i, prompt in enumerate(prompts):
        assert final[str(i)].outputs[0].token_ids == reference("llama", tuple(prompt), 6)
    assert engine.stats().preemptions == {"recompute": {}, "swap": {}}
    engine.close()


def test_a_request_that_is_too_large_alone_fails_typed_and_others_go_on() -> None:
    engine = make_engine(preemption_mode="off")
    gpu = SmallGpu(engine, max_requests=0)
    params = SamplingParams(temperature=0, max_tokens=4)
    engine.add_request("a", [1, 2, 3], params)
    with pytest.raises(OutOfMemoryError, match="activations of 3 tokens: lower max_num_batched"):
        engine.step()
    assert not engine.has_unfinished_requests()
    gpu.max_requests = 4
    assert run(engine, [[5, 6, 7]], 4)["0"].outputs[0].token_ids == reference("llama", (5, 6, 7), 4)
    engine.close()
