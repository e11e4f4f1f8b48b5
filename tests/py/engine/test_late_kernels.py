"""Engines whose kernels are still running when the next step is scheduled, as on a GPU: whatever
released slots then wait for is no shortage.

Models compute on the CPU, over the CUDA driver's stand-in; each step's kernels end a while after
it has returned.
"""

from __future__ import annotations

from collections.abc import Iterator
from threading import Timer
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer import BeamSearchParams, SamplingParams
from flexinfer import vtensor as vtensor_package
from flexinfer.engine import build
from flexinfer.memory.epochs import KernelEpoch
from flexinfer.vtensor import KVSpec, VTensorManager
from helpers import hybrids
from helpers.engine_kit import GREEDY, check, drain, make_engine, submit
from helpers.gpu_kit import host_tensor
from helpers.standin_cuda import StandinCuda
from helpers.tiny_models import random_prompts

KERNEL_S = 0.02


class LateEpoch(KernelEpoch):
    """A kernel of each step, which touches the byte at `address`, ends KERNEL_S after it."""

    def __init__(self, standin: StandinCuda, address: int, manager: VTensorManager) -> None:
        super().__init__(manager, lambda: 0)
        self._standin = standin
        self._address = address
        self.timers: list[Timer] = []

    def __exit__(self, *error: Any) -> None:
        kernel = self._standin.begin_kernel(self._address, 1)
        self.timers.append(Timer(KERNEL_S, self._standin.end_kernel, [kernel]))
        super().__exit__(*error)
        self.timers[-1].start()


@pytest.fixture
def late(standin: StandinCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines made from here on have their KV on the stand-in."""
    standin.reset(granularity=4096)
    epochs: list[LateEpoch] = []

    def on_standin(spec: KVSpec, device: str, **options: Any) -> VTensorManager:
        return VTensorManager(spec, "cuda", from_dlpack=host_tensor, **options)

    with on_standin(KVSpec(1, 1, 8), "", chunk_bytes=4096, memory_budget="64KiB") as other:
        read = other.create()
        read.extend(1)
        address = other.k(0)[read.slot].data_ptr()

        def late_epoch(manager: VTensorManager, device: Any) -> LateEpoch:
            epochs.append(LateEpoch(standin, address, manager))
            return epochs[-1]

        monkeypatch.setattr(build, "kernel_epoch", late_epoch)
        monkeypatch.setattr(vtensor_package, "VTensorManager", on_standin)
        yield
        for timer in (timer for epoch in epochs for timer in epoch.timers):
            timer.join()


@pytest.mark.parametrize("name", ["bamba", "qwen3_next"])
def test_states_find_slots_while_a_step_runs(name: str, late: None) -> None:
    engine = hybrids.make_engine(name)
    prompts = random_prompts((50, 70, 1, 33, 41), seed=1)
    prompts[3][:20] = prompts[0][:20]
    prompts[4][:36] = prompts[0][:36]
    submit(engine, prompts, SamplingParams(temperature=0, max_tokens=12))
    final = drain(engine)
    for i, prompt in enumerate(prompts):
        expected = hybrids.continuation(name, tuple(prompt), 12)
        assert final[str(i)].outputs[0].token_ids == expected
    assert sum(engine.stats().preemptions["recompute"].values()) == 0
    assert [final[i].num_cached_tokens for i in "34"] == [16, 32]
    engine.close()


@pytest.mark.parametrize("settings", [{}, {"async_scheduling": True}], ids=["sync", "async"])
def test_a_request_begins_though_the_only_slot_is_still_read(
    settings: dict[str, Any], late: None
) -> None:
    engine = make_engine(max_num_seqs=1, **settings)
    prompts = random_prompts((20, 9, 30))
    submit(engine, prompts, GREEDY)
    check(drain(engine), prompts)
    engine.close()


def test_samples_and_beams_fork_though_dropped_ones_are_still_read(late: None) -> None:
    engine = make_engine(max_num_seqs=3)
    engine.add_request("0", random_prompts((20,))[0], BeamSearchParams(beam_width=3, max_tokens=9))
    final = drain(engine)
    assert len({tuple(beam.token_ids) for beam in final["0"].outputs}) == 3
    engine.close()


def test_a_next_turn_finds_its_state_though_every_slot_is_still_read(late: None) -> None:
    engine = hybrids.make_engine("bamba", max_num_seqs=1, max_num_batched_tokens=64)
    prompts = random_prompts((47, 48))  # the last token of each writes to another state
    prompts[1][:47] = prompts[0]
    submit(engine, prompts, SamplingParams(temperature=0, max_tokens=1))
    final = drain(engine)
    for i, prompt in enumerate(prompts):
        assert final[str(i)].outputs[0].token_ids == hybrids.continuation("bamba", tuple(prompt), 1)
    assert final["1"].num_cached_tokens == 47
    engine.close()
