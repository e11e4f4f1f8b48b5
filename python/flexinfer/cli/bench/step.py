"""`flexinfer bench step`: what a step of the engine takes, and where its time goes."""

from __future__ import annotations

import json as json_module
import os
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexinfer.cli.bench.step_table import profile_table
from flexinfer.cli.errors import check_folder, usage_errors
from flexinfer.cli.fitting_table import FittingTable
from flexinfer.cli.options import ATTENTION_BACKEND_HELP, KV_CACHE_DTYPE_HELP, QUANTIZATION_HELP
from flexinfer.cli.result_file import result_file
from flexinfer.config import SUPPORTED_DTYPES
from flexinfer.runtime.json_options import require_choice

if TYPE_CHECKING:
    import torch

    from flexinfer.llm import LLM


@dataclass(frozen=True)
class StepBench:
    """One batch of requests, all started together, run to its end."""

    num_requests: int
    prompt_tokens: int
    new_tokens: int
    shared_tokens: int
    seed: int

    def __post_init__(self) -> None:
        if self.shared_tokens >= self.prompt_tokens:
            raise ValueError(
                f"shared_tokens is {self.shared_tokens}, but prompts have {self.prompt_tokens} "
                "tokens: each needs one of its own"
            )

    def check_fits(self, max_model_len: int) -> None:
        """Raises ValueError for requests that are longer than the model takes."""
        if self.prompt_tokens + self.new_tokens > max_model_len:
            raise ValueError(
                f"prompts of {self.prompt_tokens} tokens and {self.new_tokens} new ones are more "
                f"than the {max_model_len} that the model takes: lower --prompt-tokens or "
                "--new-tokens"
            )

    def prompts(self, vocab_size: int) -> list[Any]:
        rng = random.Random(self.seed)
        shared = [rng.randrange(vocab_size) for _ in range(self.shared_tokens)]
        return [
            {"prompt_token_ids": shared + [rng.randrange(vocab_size) for _ in range(own)]}
            for own in [self.prompt_tokens - self.shared_tokens] * self.num_requests
        ]


def step(
    model: Annotated[
        str | None, typer.Option(help="Folder or hub id; without it, the small one shipped.")
    ] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Read the config alone, draw the weights.")
    ] = False,
    requests: Annotated[int, typer.Option(min=1, help="Requests in the batch.")] = 32,
    prompt_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each prompt.")] = 256,
    shared_tokens: Annotated[int, typer.Option(min=0, help="Of these, common to all.")] = 0,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate for each.")] = 32,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto.")] = "auto",
    quantization: Annotated[str, typer.Option(help=QUANTIZATION_HELP)] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help=KV_CACHE_DTYPE_HELP)] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...")] = None,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads; without it, one for each core of the quota.")
    ] = None,
    compile_model: Annotated[
        bool, typer.Option("--compile", help="Compile the model with torch.compile.")
    ] = False,
    attention_backend: Annotated[str | None, typer.Option(help=ATTENTION_BACKEND_HELP)] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Also report the time of each part of a step.")
    ] = False,
    roofline: Annotated[
        bool, typer.Option("--roofline", help="--profile, and the share of what this CPU can do.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of prompts and random weights.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write every number into this file.")] = None,
) -> None:
    """Milliseconds of prefill and decode steps of one batch; with --profile, of each part."""
    with usage_errors():
        check_options(roofline, device, dtype, json)
        plan = StepBench(requests, prompt_tokens, new_tokens, shared_tokens, seed)
        from flexinfer.runtime.torch_settings import set_up_torch

        num_threads = set_up_torch(threads)
        settings: dict[str, Any] = {"compile": compile_model, "threads": threads}
        settings |= {"quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
        if attention_backend is not None:
            settings["attention_backend"] = attention_backend
        start_s = time.perf_counter()
        llm = open_engine(
            model, random_weights, dtype, device, seed, max_num_seqs=requests, **settings
        )
    opened_s = time.perf_counter() - start_s
    with llm:
        with usage_errors():
            plan.check_fits(llm.engine.max_model_len)
            report = measure(llm, plan, profile or roofline)
        if roofline:
            add_limits(report, llm.engine.loaded.dtype)
    report |= {"threads": num_threads, "load_average": os.getloadavg()[0], "open_s": opened_s}
    print_report(report)
    if json is not None:
        with result_file(json) as file:
            file.write_text(json_module.dumps(report, indent=1) + "\n")


def check_options(roofline: bool, device: str | None, dtype: str, json: Path | None) -> None:
    """Raises ValueError for what would be found out only after the work."""
    require_choice("--dtype", dtype, ("auto", *SUPPORTED_DTYPES))
    if roofline and device not in (None, "cpu"):
        raise ValueError("--roofline measures CPUs alone; --profile has the times")
    if json is not None:
        check_folder(json, "--json")


def open_engine(
    model: str | None,
    random_weights: bool,
    dtype: str,
    device: str | None,
    seed: int,
    **settings: Any,
) -> LLM:
    """The engine to measure. Raises ValueError or OSError for models that cannot be opened."""
    from flexinfer.cli.settings import EngineSettings
    from flexinfer.llm import LLM

    folder = EngineSettings(model=model).check_model()
    with TemporaryDirectory() as made:
        if random_weights:
            save_random_model(folder, made, dtype, seed)
        has_tokenizer = not random_weights and (Path(folder) / "tokenizer.json").is_file()
        return LLM(
            made if random_weights else folder,
            dtype=dtype,
            device=device,
            skip_tokenizer_init=not has_tokenizer,
            **settings,
        )


def save_random_model(folder: str, into: str, dtype: str, seed: int) -> None:
    """The architecture of a config with weights drawn at random, as a folder: the engine then owns
    the model, and loads it as any other."""
    import torch
    from transformers import AutoModelForCausalLM

    from flexinfer.models.model_config import resolve_config

    config = resolve_config(folder)
    torch.manual_seed(seed)
    drawn = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32 if dtype == "auto" else getattr(torch, dtype)
    )
    drawn.save_pretrained(into)


def measure(llm: LLM, plan: StepBench, with_parts: bool) -> dict[str, Any]:
    """Run the batch once to warm up, once measured, and once more with the profiler."""
    engine = llm.engine
    first_token_s = run_batch(llm, StepBench(1, 2, 2, 0, plan.seed))[0]
    run_batch(llm, plan)
    llm.reset_prefix_cache()
    _, steps, seconds = run_batch(llm, plan)
    decodes = [step for step in steps if not step.num_prefill_tokens]
    prefills = [step for step in steps if step.num_prefill_tokens]
    report: dict[str, Any] = {
        "model": engine.loaded.name,
        "dtype": str(engine.loaded.dtype).removeprefix("torch."),
        "first_token_s": first_token_s,
        "tokens_per_s": plan.num_requests * plan.new_tokens / seconds,
        "num_steps": len(steps),
        "decode_step_ms": statistics.median(step.step_us for step in decodes) / 1e3,
        "prefill_tokens_per_s": sum(step.num_tokens for step in prefills)
        / sum(step.step_us / 1e6 for step in prefills),
    }
    if with_parts:
        from flexinfer.engine.profile import StepProfiler

        llm.reset_prefix_cache()
        with StepProfiler(engine) as profiler:
            run_batch(llm, plan)
        report["prefill"] = profiler.prefill.as_dict()
        report["decode"] = profiler.decode.as_dict()
    return report


def add_limits(report: dict[str, Any], dtype: torch.dtype) -> None:
    """What the machine can do, and how much of that each part reaches: the least time that its
    work takes as a share of the time it takes. Above 1: its bytes come from a cache. Parts are of
    steps under the profiler, which takes apart what is one call without it; `decode_of_limit` is of
    steps without."""
    from flexinfer.runtime.limits import measure_limits

    limits = measure_limits(dtype)
    report["limits"] = {
        "gbytes_per_s": limits.bytes_per_s / 1e9,
        "gflop_per_s": limits.flops_per_s / 1e9,
    }
    for kind in (report["prefill"], report["decode"]):
        for part in kind["parts"].values():
            least_ms = 1e3 * limits.seconds(1e9 * part["gflop"], 1e6 * part["mbytes"])
            part["of_limit"] = least_ms / part["ms"] if part["ms"] else 0.0
        kind["of_limit"] = (
            sum(part["of_limit"] * part["ms"] for part in kind["parts"].values()) / kind["step_ms"]
        )
    least_ms = report["decode"]["of_limit"] * report["decode"]["step_ms"]
    report["decode_of_limit"] = least_ms / report["decode_step_ms"]


def run_batch(llm: LLM, plan: StepBench) -> tuple[float, list[Any], float]:
    """(seconds to the first token, StepStats of each step, seconds in all). Raises ValueError if
    a request fails: what the others took is no measurement."""
    from flexinfer.sampling.params import SamplingParams

    engine = llm.engine
    params = SamplingParams(temperature=0.0, max_tokens=plan.new_tokens, ignore_eos=True)
    start_s = time.perf_counter()
    for index, prompt in enumerate(plan.prompts(engine.loaded.vocab_size)):
        engine.add_request(f"bench-{index}", prompt, params)
    steps: list[Any] = []
    first_token_s = 0.0
    while engine.has_unfinished_requests():
        outputs = engine.step()
        if outputs and not first_token_s:
            first_token_s = time.perf_counter() - start_s
        for completion in (one for output in outputs for one in output.outputs):
            if completion.finish_reason == "error":
                raise ValueError(f"a request has failed: {completion.stop_reason}")
        if engine.last_step is not None:
            steps.append(engine.last_step)
    return first_token_s, steps, time.perf_counter() - start_s


def print_report(report: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console()
    console.print(
        f"{report['model']} {report['dtype']}, {report['threads']} threads, load "
        f"{report['load_average']:.1f}: opened in {report['open_s']:.1f} s, first token "
        f"{1e3 * report['first_token_s']:.0f} ms later",
        highlight=False,
    )
    console.print(
        f"{report['tokens_per_s']:.0f} new tokens/s; decode step {report['decode_step_ms']:.2f} ms "
        f"(median); prefill {report['prefill_tokens_per_s']:.0f} tokens/s",
        highlight=False,
    )
    if "limits" in report:
        limits = report["limits"]
        console.print(
            f"this machine reads {limits['gbytes_per_s']:.1f} GB/s and computes "
            f"{limits['gflop_per_s']:.0f} GFLOP/s in {report['dtype']}: a decode step could take "
            f"{report['decode_of_limit']:.0%} of its time. The profiler makes it longer:",
            highlight=False,
        )
    if "decode" in report:
        console.print(FittingTable(profile_table(report["prefill"], report["decode"])))
