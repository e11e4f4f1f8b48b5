"""What is measured: decodes that grow by a token a step, on one driver, in one mode.

The scheduler and the manager are the real ones. The "kernel" is a period of fixed length: the CPU
sleeps while the simulated A100 computes, and spins while the host does.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from flexinfer import SamplingParams, _vtensor
from flexinfer.metrics.steps import StepMeter, StepStats
from flexinfer.outputs import RequestMetrics
from flexinfer.scheduler.batch import Batch
from flexinfer.scheduler.request import Request
from flexinfer.scheduler.scheduler import Scheduler
from flexinfer.scheduler_config import SchedulerConfig
from flexinfer.vtensor import KVSpec, VTensorManager

MODES = ("off", "on", "on+eager", "pre-mapped")
"""Pre-extension off; on; on with chunks created ahead (eager allocation), as the engine has it by
default; and all memory mapped before the first step."""


PREFILL_STEPS = 100
"""Room for the tokens that the first requests get while the last are being prefilled."""


@dataclass(frozen=True)
class Setting:
    """A model's KV, a driver, and how long a step computes."""

    device: str
    spec: KVSpec
    num_requests: int
    kernel_s: float
    spins: bool
    chunk_bytes: int = 2 << 20
    prompt_tokens: int = 256

    @property
    def kernel(self) -> Callable[[float], None]:
        return _spin if self.spins else time.sleep


def _llama(num_layers: int, head_dim: int, layers_per_plane: int | None) -> KVSpec:
    return KVSpec(num_layers, 8, head_dim, "bfloat16", 2048, layers_per_plane)


SETTINGS = {
    # Llama-3-8B: 16 tokens per row of one 2 MiB chunk, or 1,024 tokens per row of 64.
    "sim-interleaved": Setting("sim", _llama(32, 128, None), 32, 0.020, spins=False),
    "sim-dense": Setting("sim", _llama(32, 128, 1), 32, 0.020, spins=False),
    # Llama-3.2-1B: 64 tokens per row of one 2 MiB chunk, really created, collapsed and scrubbed.
    "host-interleaved": Setting("cpu", _llama(16, 64, None), 16, 0.010, spins=True),
}


class _TimedManager(VTensorManager):
    """On the sim driver, calls take the time that they take on an A100."""

    def _open(
        self, driver: _vtensor.DriverConfig, options: _vtensor.ManagerOptions
    ) -> _vtensor.Manager:
        driver.a100_latency = True
        driver.real_time = True
        return super()._open(driver, options)


@dataclass(frozen=True)
class Run:
    """Measured steps, the warm-up left out."""

    latencies_us: list[float]
    steps: list[StepStats]
    depth_tokens: int


def run(setting: Setting, mode: str, num_steps: int, num_warm_up: int, seed: int) -> Run:
    """`num_steps` steps of decoding, after the prefill and a warm-up in which depth is learned."""
    max_tokens = PREFILL_STEPS + num_warm_up + num_steps
    manager = _make_manager(setting, mode)
    scheduler = _make_scheduler(setting, manager, mode)
    _add_requests(scheduler, setting, max_tokens, random.Random(seed))
    meter = StepMeter(manager)
    _prefill(scheduler, setting)
    if mode == "pre-mapped":
        for request in scheduler.running.values():
            assert request.vtensor is not None
            request.vtensor.extend(request.max_num_tokens)
    manager.drain()
    latencies: list[float] = []
    steps: list[StepStats] = []
    gc.collect()
    gc.disable()
    for idx in range(num_warm_up + num_steps):
        start_s = time.perf_counter()
        step = _step(scheduler, setting, meter)
        if idx >= num_warm_up:
            latencies.append((time.perf_counter() - start_s) * 1e6)
            steps.append(step)
    gc.enable()
    depth = scheduler.pre_extender.depth.tokens
    manager.close()
    return Run(latencies, steps, depth)


def _step(scheduler: Scheduler, setting: Setting, meter: StepMeter) -> StepStats:
    """As LLMEngine.step(), with the kernel's period in the model's place."""
    meter.start()
    batch = scheduler.schedule()
    scheduler.pre_extend(batch)
    setting.kernel(setting.kernel_s)
    _sample(scheduler, batch)
    step = meter.stop(num_requests=len(batch.items), num_tokens=batch.num_tokens)
    scheduler.observe(step)
    return step


def _prefill(scheduler: Scheduler, setting: Setting) -> None:
    """Until every request decodes; not measured, and computed in no time."""
    while scheduler.waiting or any(r.is_prefilling for r in scheduler.running.values()):
        _sample(scheduler, scheduler.schedule())


def _sample(scheduler: Scheduler, batch: Batch) -> None:
    scheduler.advance(batch)
    for item in batch.items:
        if item.samples:
            item.request.append(7)


def _make_manager(setting: Setting, mode: str) -> VTensorManager:
    make = _TimedManager if setting.device == "sim" else VTensorManager
    row_bytes = setting.chunk_bytes * setting.spec.num_planes
    longest = setting.spec.max_seq_len * setting.spec.bytes_per_token
    budget = setting.num_requests * (longest + row_bytes)
    return make(
        setting.spec,
        setting.device,
        max_requests=setting.num_requests,
        memory_budget=budget,
        chunk_bytes=setting.chunk_bytes,
        park=False,
        min_free_bytes=4 * row_bytes if mode == "on+eager" else 0,
    )


def _make_scheduler(setting: Setting, manager: VTensorManager, mode: str) -> Scheduler:
    config = SchedulerConfig(
        max_model_len=setting.spec.max_seq_len,
        max_num_seqs=setting.num_requests,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
        enable_pre_extend=mode != "off",
    )
    return Scheduler(config, manager)


def _add_requests(
    scheduler: Scheduler, setting: Setting, max_tokens: int, rng: random.Random
) -> None:
    """Prompts of random lengths, so that rows fall due at all times."""
    spread = setting.spec.max_seq_len - setting.prompt_tokens - max_tokens
    for idx in range(setting.num_requests):
        num_prompt = setting.prompt_tokens + rng.randrange(min(spread, 1024))
        scheduler.add(
            Request(
                request_id=str(idx),
                prompt_token_ids=[1] * num_prompt,
                params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
                max_num_tokens=num_prompt + max_tokens,
                metrics=RequestMetrics(arrival_time=0.0),
            )
        )


def _spin(seconds: float) -> None:
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        pass
