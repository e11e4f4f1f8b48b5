"""Step time of the whole engine with mapping ahead of the kernels and without; see README.md.

python benchmarks/gpu_overlap/bench.py [--device cpu|cuda] [--quick] [--json FILE] [--seconds N]
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu_common"))

import torch
from card import shrink, usable_bytes
from device_models import SHAPES, graph_sizes, make_model
from harness import Deadline, Row, finish, keep, parse, table

from flexinfer import LLM, SamplingParams
from flexinfer.metrics.steps import StepStats

TARGET_EXPOSED_FRACTION = 0.01
TARGET_P99_RATIO = 1.02
MODES: dict[str, dict[str, Any]] = {
    "off": {"enable_pre_extend": False, "eager_allocation": False},
    "on": {"enable_pre_extend": True, "eager_allocation": False},
    "on+eager": {"enable_pre_extend": True, "eager_allocation": True},
    "pre-mapped": {"enable_pre_extend": False, "eager_allocation": False},
}
"""Mapping in the step; ahead of it; with chunks created ahead too (the default); all before."""


@dataclass(frozen=True)
class Setting:
    """A model's KV layout and how many requests decode."""

    name: str
    model: str
    layers_per_plane: int | None
    num_requests: int
    num_steps: int
    prompt_tokens: int
    num_warm_up: int = 20
    chunk_bytes: int = 2 << 20

    @property
    def max_len(self) -> int:
        return self.prompt_tokens + 256 + self.num_warm_up + self.num_steps

    @property
    def kv_bytes(self) -> int:
        """For all requests to their ends, in whole rows, and some rows more."""
        shape = SHAPES[self.model]
        head_dim = shape.hidden_size // shape.num_heads
        token_bytes = 2 * shape.num_layers * shape.num_kv_heads * head_dim * 2
        planes = 2 * shape.num_layers if self.layers_per_plane == 1 else 1
        row_bytes = planes * self.chunk_bytes
        a_request = -(-self.max_len * token_bytes // row_bytes + 1) * row_bytes
        return self.num_requests * a_request + 8 * row_bytes

    def halved(self) -> Setting:
        return replace(self, num_requests=max(1, self.num_requests // 2))


def settings_of(quick: bool) -> list[Setting]:
    if quick:
        return [Setting("interleaved", "toy", None, 4, 20, 64, num_warm_up=5, chunk_bytes=8 << 10)]
    return [
        Setting("interleaved", "llama-3-8b", None, 64, 150, 256),
        Setting("dense", "llama-3-8b", 1, 64, 150, 900),
    ]


def open_engine(setting: Setting, model: Any, device: str, **options: Any) -> LLM:
    """No prefix cache, so that all memory is new."""
    return LLM(
        model,
        device=device,
        skip_tokenizer_init=True,
        max_model_len=setting.max_len,
        max_num_seqs=setting.num_requests,
        max_num_batched_tokens=max(2048, setting.num_requests),
        kv_cache_memory_bytes=setting.kv_bytes,
        layers_per_plane=setting.layers_per_plane,
        chunk_bytes=setting.chunk_bytes,
        enable_prefix_caching=False,
        **graph_sizes((setting.num_requests,)),
        **options,
    )


def run_mode(setting: Setting, model: Any, device: str, mode: str) -> list[StepStats]:
    """Decode steps after a warm-up; parking is off, so every row is created and mapped anew."""
    options = {**MODES[mode], "enable_deferred_reclamation": False}
    llm = open_engine(setting, model, device, **options)
    try:
        add_requests(llm, setting, random.Random(0))
        engine = llm.llm_engine
        while engine.scheduler.waiting or any(
            request.is_prefilling for request in engine.scheduler.running.values()
        ):
            engine.step()
        if mode == "pre-mapped":
            for request in engine.scheduler.running.values():
                assert request.vtensor is not None
                request.vtensor.extend(request.max_num_tokens)
        engine.manager.drain()
        steps = []
        gc.collect()
        for index in range(setting.num_warm_up + setting.num_steps):
            engine.step()
            step = engine.last_step
            if index >= setting.num_warm_up and step is not None:
                steps.append(step)
        return steps
    finally:
        llm.close()


def add_requests(llm: LLM, setting: Setting, rng: random.Random) -> None:
    """Prompts of different lengths, so that rows fall due at all times."""
    vocab = SHAPES[setting.model].vocab_size
    max_tokens = setting.num_warm_up + setting.num_steps + setting.num_requests
    for index in range(setting.num_requests):
        length = setting.prompt_tokens + rng.randrange(128)
        prompt = [rng.randrange(vocab) for _ in range(length)]
        params = SamplingParams(
            temperature=0.0, max_tokens=min(max_tokens, setting.max_len - length), ignore_eos=True
        )
        llm.llm_engine.add_request(str(index), {"prompt_token_ids": prompt}, params)


def numbers(setting: Setting, mode: str, steps: Sequence[StepStats]) -> Row:
    times = sorted(step.step_us for step in steps)
    exposed = sum(step.map_us_exposed for step in steps)
    return {
        "setting": setting.name,
        "mode": mode,
        "steps": len(steps),
        "p50_us": round(statistics.median(times)),
        "p99_us": round(times[min(len(times) - 1, int(0.99 * len(times)))]),
        "max_us": round(times[-1]),
        "exposed_us_a_step": round(exposed / len(steps), 2),
        "exposed_fraction": round(exposed / sum(times), 6),
        "hidden_us_a_step": round(sum(step.map_us_hidden for step in steps) / len(steps), 1),
        "rows_pre_extended": sum(step.rows_pre_extended for step in steps),
    }


def reclamation(setting: Setting, model: Any, device: str, deferred: bool) -> Row:
    """Requests that come and go: driver calls and step time, released slots parked or not."""
    llm = open_engine(setting, model, device, enable_deferred_reclamation=deferred)
    rng = random.Random(0)
    vocab = SHAPES[setting.model].vocab_size
    length = setting.prompt_tokens // 2
    rounds = 3
    try:
        times: list[float] = []
        calls: list[int] = []
        for index in range(rounds):
            before = driver_calls(llm)
            for number in range(setting.num_requests):
                prompt = [rng.randrange(vocab) for _ in range(length)]
                params = SamplingParams(temperature=0.0, max_tokens=8 + number % 8, ignore_eos=True)
                llm.llm_engine.add_request(
                    f"{index}-{number}", {"prompt_token_ids": prompt}, params
                )
            while llm.llm_engine.has_unfinished_requests():
                llm.llm_engine.step()
                step = llm.llm_engine.last_step
                if index and step is not None:
                    times.append(step.step_us)
            calls.append(driver_calls(llm) - before)
        return {
            "setting": setting.name,
            "deferred": deferred,
            "p50_us": round(statistics.median(times)),
            "p99_us": round(sorted(times)[int(0.99 * (len(times) - 1))]),
            "driver_calls_first_round": calls[0],
            "driver_calls_last_round": calls[-1],
        }
    finally:
        llm.close()


def driver_calls(llm: LLM) -> int:
    """Calls that change mappings or memory, so far."""
    kinds = ("create", "map", "set_access", "unmap", "release")
    calls = llm.llm_engine.manager.stats().driver_calls
    return sum(calls[kind].calls for kind in kinds if kind in calls)


def verdicts(rows: Sequence[Row]) -> list[Row]:
    """The targets: exposed time below 1 % of step time, p99 within 2 % of pre-mapped."""
    by_mode = {(row["setting"], row["mode"]): row for row in rows}
    out = []
    for (setting, mode), row in by_mode.items():
        mapped = by_mode.get((setting, "pre-mapped"))
        if mode == "pre-mapped" or mapped is None:
            continue
        ratio = row["p99_us"] / mapped["p99_us"]
        out.append(
            {
                "setting": setting,
                "mode": mode,
                "exposed_below_1_percent": row["exposed_fraction"] < TARGET_EXPOSED_FRACTION,
                "p99_over_pre_mapped": round(ratio, 4),
                "p99_within_2_percent": ratio <= TARGET_P99_RATIO,
            }
        )
    return out


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print tables, write the numbers."""
    options = parse(__doc__, argv, seconds=90)
    deadline = Deadline(options.seconds)
    rows: list[Row] = []
    churn: list[Row] = []
    made: tuple[str, Any] = ("", None)
    for wanted in settings_of(options.quick):
        if made[0] != wanted.model:
            made = (wanted.model, make_model(wanted.model, options.device, torch.bfloat16))
        usable = usable_bytes(options.device)
        setting = shrink(wanted, Setting.halved, lambda one: one.kv_bytes, usable)
        if setting != wanted:
            deadline.left_out.append(f"{setting.name}: beyond {setting.num_requests} requests")
        for mode in MODES:
            if not deadline.passed(f"{setting.name}: {mode}"):
                steps = run_mode(setting, made[1], options.device, mode)
                rows.append(numbers(setting, mode, steps))
                keep(options, "gpu_overlap", deadline, {"modes": rows, "verdicts": verdicts(rows)})
        churn += [
            reclamation(setting, made[1], options.device, deferred)
            for deferred in (False, True)
            if not deadline.passed(f"{setting.name}: deferred reclamation {deferred}")
        ]
    judged = verdicts(rows)
    tables = [
        table(rows, list(rows[0]) if rows else [], "decode steps of the engine"),
        table(judged, list(judged[0]) if judged else [], "targets"),
        table(churn, list(churn[0]) if churn else [], "requests that come and go"),
    ]
    body = {"modes": rows, "verdicts": judged, "reclamation": churn}
    finish(options, "gpu_overlap", deadline, tables, body)


if __name__ == "__main__":
    main()
