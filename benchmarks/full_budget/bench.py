"""Thousands of requests over a few shared prompts, in a KV budget that is full; see README.md.

python benchmarks/full_budget/bench.py [--device cpu|cuda] [--quick] [--json FILE] [--seconds N]
                                       [--fraction 0.2] [--runs flexinfer,pages]
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu_common"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

import torch
from card import shrink, usable_bytes
from continuous_batching import ContinuousBatching, kv_token_bytes
from device_models import graph_sizes, make_model
from engines import open_ours, open_paged, paged_kernels
from harness import Deadline, Row, finish, keep, parse, table
from paged_attention import PagedKernel, on_ranges

from flexinfer import LLM, SamplingParams
from flexinfer.vtensor import KVSpec

MIB = 1 << 20
RIVAL = "transformers-continuous"


@dataclass(frozen=True)
class Load:
    """The published workload, and where it stops being published: the lengths of a request's own
    tokens and of its answer are ours."""

    model: str
    num_requests: int
    num_shared: int
    shared_tokens: int
    own_tokens: tuple[int, int]
    new_tokens: int
    max_num_seqs: int

    @property
    def max_len(self) -> int:
        return self.shared_tokens + self.own_tokens[1] + self.new_tokens

    def prompts(self, vocab_size: int, num_requests: int) -> list[list[int]]:
        rng = random.Random(0)
        draw = range(1, vocab_size)
        shared = [rng.choices(draw, k=self.shared_tokens) for _ in range(self.num_shared)]
        own = [rng.choices(draw, k=rng.randint(*self.own_tokens)) for _ in range(num_requests)]
        return [shared[i % self.num_shared] + tokens for i, tokens in enumerate(own)]

    def halved(self) -> Load:
        """Half as many requests at once, for a small card."""
        return replace(self, max_num_seqs=max(1, self.max_num_seqs // 2))

    def kv_bytes(self, token_bytes: int) -> int:
        """What is in use at once, the shared prompts counted once, and a tenth: after a few hundred
        requests the pool is full of prefixes that nobody asks for again, and evicts from then on.
        """
        own = self.own_tokens[1] + self.new_tokens
        tokens = self.num_shared * self.shared_tokens + self.max_num_seqs * own
        return int(1.1 * tokens * token_bytes)


PUBLISHED = Load("llama-3-8b", 5_000, 15, 512, (16, 96), 32, 256)
TOY = Load("toy", 60, 3, 64, (4, 16), 6, 8)


def fit(load: Load, token_bytes: int, usable: int | None) -> Load:
    """The load with so few requests at once that twice its budget fits: layouts with large rows
    need more than they use."""
    return shrink(load, Load.halved, lambda one: 2 * one.kv_bytes(token_bytes), usable)


@dataclass(frozen=True)
class Run:
    """One engine in one setting, and its share of the requests."""

    engine: str
    layout: str
    num_requests: int
    open: Callable[..., AbstractContextManager[LLM]]
    settings: dict[str, Any]
    row_bytes: int
    """What a request's KV grows by at a time."""


def ours(
    load: Load, model: Any, num_requests: int, planes: int | None, chunk_bytes: int, **more: Any
) -> Run:
    """Our engine with all layers in one plane (None), or so many, and chunks of a size."""
    name = {None: "interleaved", 1: "dense"}.get(planes, f"{planes} layers a plane")
    size = chunk_bytes
    layout = f"{name}, {size // MIB} MiB" if size >= MIB else f"{name}, {size >> 10} KiB"
    settings = {"layers_per_plane": planes, "chunk_bytes": chunk_bytes}
    num_planes = KVSpec(model.config.num_hidden_layers, 1, 1, layers_per_plane=planes).num_planes
    return Run(
        "flexinfer",
        layout,
        num_requests,
        partial(open_ours, **more),
        settings,
        num_planes * chunk_bytes,
    )


def pages(model: Any, num_requests: int, kernel: PagedKernel, page_tokens: int) -> Run:
    """The same engine over pages."""
    return Run(
        "pages",
        f"{page_tokens} tokens",
        num_requests,
        partial(open_paged, kernel=kernel, page_tokens=page_tokens),
        {},
        page_tokens * kv_token_bytes(model.config, model.dtype.itemsize),
    )


def runs(
    load: Load,
    model: Any,
    kernels: Sequence[tuple[PagedKernel, int]],
    *,
    fraction: float,
    quick: bool,
) -> Iterator[Run]:
    """The default and the best paged one with `fraction` of the requests, then again the other way
    round with a fifth of these, so that both are seen twice; then what else there is."""
    unit = (16 << 10) if quick else 2 * MIB
    most = int(load.num_requests * fraction)
    some = most // 5
    yield ours(load, model, most, None, unit)
    for kernel, page_tokens in kernels[:1]:
        yield pages(model, most, kernel, page_tokens)
        yield pages(model, some, kernel, page_tokens)
    yield ours(load, model, some, None, unit)
    if any(kernel.name == "triton" for kernel, _ in kernels) and model.device.type == "cuda":
        yield ours(load, model, some, None, unit, backend=on_ranges)
    for kernel, page_tokens in kernels[1:]:
        yield pages(model, some, kernel, page_tokens)
    half = model.config.num_hidden_layers // 2
    for planes, chunk_bytes in ((None, 4 * unit), (half, unit), (1, unit), (1, 4 * unit)):
        yield ours(load, model, some, planes, chunk_bytes)


def needed_bytes(run: Run, load: Load, budget: int) -> int:
    """The budget, and half a row a request for what large rows leave unused."""
    return budget + load.max_num_seqs * run.row_bytes // 2


def measure(run: Run, model: Any, load: Load, budget: int, deadline: Deadline) -> Row:
    """Tokens a second; what was not through at the deadline is left out."""
    kv_bytes = needed_bytes(run, load, budget)
    settings = {
        "max_model_len": load.max_len,
        "max_num_seqs": load.max_num_seqs,
        "kv_cache_memory_bytes": kv_bytes,
        **graph_sizes(tuple(sorted({64, 128, load.max_num_seqs}))),
        **run.settings,
    }
    with run.open(model, **settings) as llm:
        engine = llm.llm_engine
        params = SamplingParams(temperature=0.0, max_tokens=load.new_tokens, ignore_eos=True)
        prompts = load.prompts(model.config.vocab_size, run.num_requests)
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
        num_done = 0
        start = time.perf_counter()
        while engine.has_unfinished_requests() and deadline.remaining_s > 0:
            num_done += sum(output.finished for output in engine.step())
        seconds = time.perf_counter() - start
        engine.abort_request([str(i) for i in range(len(prompts))])
        stats, preemptions = engine.manager.stats(), engine.stats().preemptions
        kernel = name_of(engine.runner.backend)
    return {
        "kernel": kernel,
        "requests": num_done,
        "of": len(prompts),
        "seconds": round(seconds, 2),
        "requests_per_s": round(num_done / seconds, 2),
        "tokens_per_s": round(num_done * load.new_tokens / seconds, 1),
        "kv_gib": round(kv_bytes / 2**30, 3),
        "chunks_aliased": stats.chunks_aliased,
        "chunks_evicted": stats.chunks_evicted,
        "preemptions": sum(sum(by_reason.values()) for by_reason in preemptions.values()),
    }


def name_of(backend: Any) -> str:
    """Whose kernel decodes."""
    name = getattr(backend, "name", type(backend).__name__)
    decode = name.partition(",")[0].removeprefix("decode: ")
    return next((known for known in ("flash-attn", "torch", "triton") if known in decode), decode)


def add_ratios(rows: Sequence[Row]) -> None:
    """vs_pages: tokens a second over those of pages under the same kernel and as many requests."""
    rivals = [row for row in rows if row["engine"] == "pages" and "tokens_per_s" in row]
    for row in rows:
        if row["engine"] != "flexinfer" or "tokens_per_s" not in row:
            continue
        same = [r for r in rivals if all(r[name] == row[name] for name in ("kernel", "of"))]
        if same and all(one["requests"] == one["of"] for one in (row, *same)):
            best = max(rival["tokens_per_s"] for rival in same)
            row["vs_pages"] = round(row["tokens_per_s"] / best, 3)


def attempt(run: Run, model: Any, load: Load, budget: int, deadline: Deadline) -> Row:
    """A row: numbers, or why there are none. A failure of ours is raised."""
    head = {"engine": run.engine, "layout": run.layout}
    usable = usable_bytes(model.device.type)
    if usable is not None and needed_bytes(run, load, budget) > usable:
        return head | {"failed": "the card has too little memory for rows that large"}
    try:
        return head | measure(run, model, load, budget, deadline)
    except (RuntimeError, ValueError, ImportError, MemoryError) as error:
        if run.engine == "flexinfer":
            raise
        return head | {"failed": f"{type(error).__name__}: {str(error)[:200]}"}


def run_rival(model: Any, load: Load, budget: int, deadline: Deadline, quick: bool) -> Row:
    """transformers' continuous batching over pages that requests share."""
    page_tokens = 32 if quick else 256
    batching = ContinuousBatching(
        model, kv_bytes=budget, page_tokens=page_tokens, max_batch_tokens=2048
    )
    prompts = load.prompts(model.config.vocab_size, load.num_requests // 5)
    num_done = 0

    def poll(done: int, total: int) -> None:
        nonlocal num_done
        num_done = done
        if deadline.remaining_s < 0:
            raise TimeoutError

    with closing(batching):
        start = time.perf_counter()
        try:
            batching(prompts, load.new_tokens, on_poll=poll)
        except TimeoutError:
            deadline.left_out.append(f"{RIVAL}: {len(prompts) - num_done} requests")
        seconds = time.perf_counter() - start
    return {
        "requests": num_done,
        "of": len(prompts),
        "seconds": round(seconds, 2),
        "requests_per_s": round(num_done / seconds, 2),
        "tokens_per_s": round(num_done * load.new_tokens / seconds, 1),
        "kv_gib": round(budget / 2**30, 3),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, write the numbers as they come."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--fraction", type=float, default=1.0, help="of the requests")
    parser.add_argument("--runs", default=f"flexinfer,pages,{RIVAL}")
    chosen, rest = parser.parse_known_args(argv)
    options = parse(__doc__, rest, seconds=200)
    deadline = Deadline(options.seconds)
    wanted = TOY if options.quick else PUBLISHED
    torch.set_grad_enabled(False)
    model = make_model(wanted.model, options.device, torch.bfloat16)
    token_bytes = kv_token_bytes(model.config, model.dtype.itemsize)
    load = fit(wanted, token_bytes, usable_bytes(options.device))
    if load != wanted:
        deadline.left_out.append(f"more than {load.max_num_seqs} requests at once: no memory")
    head_dim = model.config.hidden_size // model.config.num_attention_heads
    kernels, reasons = paged_kernels(model.device, head_dim)
    budget = load.kv_bytes(token_bytes)
    rows: list[Row] = []
    body = {"rows": rows, "load": vars(load), "kernels_left_out": reasons}
    for run in runs(load, model, kernels, fraction=chosen.fraction, quick=options.quick):
        what = f"{run.engine}, {run.layout}, {run.num_requests} requests"
        if run.engine in chosen.runs.split(",") and not deadline.passed(what):
            rows.append(attempt(run, model, load, budget, deadline))
            add_ratios(rows)
            keep(options, "full_budget", deadline, body)
        gc.collect()
    if RIVAL in chosen.runs.split(",") and not deadline.passed(RIVAL):
        row = {"engine": RIVAL, "layout": "pages"}
        try:
            row |= run_rival(model, load, budget, deadline, options.quick)
        except (RuntimeError, ValueError, ImportError) as error:  # a peer's failure is no fault
            row |= {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
        rows.append(row)
    columns = ["engine", "kernel", "layout", "requests", "of", "seconds", "requests_per_s"]
    columns += ["tokens_per_s", "vs_pages", "kv_gib", "chunks_aliased", "chunks_evicted"]
    tables = [table(rows, [*columns, "preemptions", "failed"], "a full budget")]
    tables += [f"paged kernel left out: {name}: {reason}" for name, reason in reasons.items()]
    finish(options, "full_budget", deadline, tables, body)


if __name__ == "__main__":
    main()
