"""A step's kernels are announced to the manager; a CPU does without."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer.memory.epochs import KernelEpoch, kernel_epoch
from flexinfer.vtensor import KVSpec, VTensorManager
from helpers.engine_kit import make_engine, run
from helpers.tiny_models import random_prompts, reference

SPEC = KVSpec(num_layers=1, num_kv_heads=1, head_dim=16, max_seq_len=256)


def make_manager() -> VTensorManager:
    return VTensorManager(SPEC, "sim", max_requests=4, memory_budget="1MiB", chunk_bytes=4096)


def test_a_cpu_needs_no_epoch() -> None:
    with make_manager() as manager:
        assert isinstance(kernel_epoch(manager, torch.device("cpu")), nullcontext)


def test_what_is_released_in_a_step_is_not_used_again_before_its_end() -> None:
    with make_manager() as manager:
        request = manager.create()
        request.extend(32)
        with KernelEpoch(manager, lambda: 0):
            slot = request.slot
            request.release()
            other = manager.create(expected_tokens=32)
            assert other.slot != slot
        assert manager.create(expected_tokens=32).slot == slot


def test_the_stream_is_asked_for_when_the_kernels_are_out() -> None:
    told: list[str] = []

    class Watched:
        def begin_step(self) -> None:
            told.append("begin")

        def end_step(self, stream: int) -> None:
            told.append(f"end {stream}")

    class Device:
        def __enter__(self) -> None:
            told.append("device")

        def __exit__(self, *error: Any) -> None:
            told.append("device off")

    with KernelEpoch(Watched(), lambda: 42, Device()):  # type: ignore[arg-type]
        told.append("kernels")
    assert told == ["device", "begin", "kernels", "end 42", "device off"]


def test_a_step_that_fails_is_closed_and_its_error_goes_on() -> None:
    with make_manager() as manager:
        with pytest.raises(RuntimeError, match="kernel"), KernelEpoch(manager, lambda: 0):
            raise RuntimeError("kernel")
        request = manager.create([1, 2])
        request.extend(8)
        request.fork().extend(9)  # copies the tail: refused while a step is open


def test_of_two_failures_the_first_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def no_stream() -> int:
        raise RuntimeError("the context is gone")

    with make_manager() as manager:
        epoch = KernelEpoch(manager, no_stream)
        with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError, match="kernel"), epoch:
            raise RuntimeError("kernel")
        with pytest.raises(RuntimeError, match="context"), epoch:
            pass
    assert "the context is gone" in caplog.text


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_an_engine_never_asks_for_what_an_open_step_forbids(
    mode: str, async_scheduling: bool
) -> None:
    """The epochs of a GPU around the steps of a CPU: the manager would raise ValueError."""
    engine = make_engine(
        kv_cache_memory_bytes=96 << 10,
        preemption_mode=mode,
        swap_space="4MiB",
        async_scheduling=async_scheduling,
    )
    engine._steps.execution.epoch = KernelEpoch(engine.manager, lambda: 0)
    prompts = random_prompts((5, 9, 3, 7, 12, 1, 8, 2), seed=5)
    shared = prompts[0] * 2
    prompts = [shared + prompt for prompt in prompts]
    final = run(engine, prompts, num_new=12)
    for i, prompt in enumerate(prompts):
        assert final[str(i)].outputs[0].token_ids == reference("llama", tuple(prompt), 12)
    engine.close()
