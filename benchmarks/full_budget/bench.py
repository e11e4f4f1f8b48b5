"""Thousands of requests over a few shared prompts, in a KV budget that is full; see README.md.

python benchmarks/full_budget/bench.py [--device cpu|cuda] [--quick] [--json FILE] [--seconds N]
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu_common"))

import torch
from continuous_batching import ContinuousBatching, kv_token_bytes
from device_models import graph_sizes, make_model
from harness import Deadline, Row, finish, keep, parse, table

from flexinfer import LLM, SamplingParams

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

    def kv_bytes(self, token_bytes: int) -> int:
        """What is in use at once, the shared prompts counted once, and a tenth: after a few hundred
        requests the pool is full of prefixes that nobody asks for again, and evicts from then on.
        """
        own = self.own_tokens[1] + self.new_tokens
        tokens = self.num_shared * self.shared_tokens + self.max_num_seqs * own
        return int(1.1 * tokens * token_bytes)


PUBLISHED = Load("llama-3-8b", 5_000, 15, 512, (16, 96), 32, 256)
TOY = Load("toy", 60, 3, 64, (4, 16), 6, 8)


@dataclass(frozen=True)
class Variant:
    """Our engine with some layout, chunk size and share of the requests."""

    layers_per_plane: int | None
    chunk_bytes: int
    num_requests: int

    @property
    def layout(self) -> str:
        planes = "interleaved" if self.layers_per_plane is None else "dense"
        size = self.chunk_bytes
        return f"{planes}, {size // MIB} MiB" if size >= MIB else f"{planes}, {size >> 10} KiB"


def variants(load: Load, *, quick: bool) -> Iterator[Variant]:
    """The default with all requests; the others with some."""
    unit = (16 << 10) if quick else 2 * MIB
    some = load.num_requests // 5
    yield Variant(None, unit, load.num_requests)
    for layers_per_plane, chunk_bytes in ((None, unit), (None, 4 * unit), (1, unit), (1, 4 * unit)):
        yield Variant(layers_per_plane, chunk_bytes, some)


def run_flexinfer(model: Any, load: Load, variant: Variant, budget: int, deadline: Deadline) -> Row:
    """Tokens a second of our engine; what was not through at the deadline is left out."""
    planes = 1 if variant.layers_per_plane is None else 2 * model.config.num_hidden_layers
    rounding = load.max_num_seqs * planes * variant.chunk_bytes
    llm = LLM(
        model,
        device=str(model.device.type),
        skip_tokenizer_init=True,
        max_model_len=load.max_len,
        max_num_seqs=load.max_num_seqs,
        kv_cache_memory_bytes=budget + rounding // 2,
        layers_per_plane=variant.layers_per_plane,
        chunk_bytes=variant.chunk_bytes,
        **graph_sizes((64, 128, load.max_num_seqs)),
    )
    with closing(llm):
        engine = llm.llm_engine
        params = SamplingParams(temperature=0.0, max_tokens=load.new_tokens, ignore_eos=True)
        prompts = load.prompts(model.config.vocab_size, variant.num_requests)
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
        num_done = 0
        start = time.perf_counter()
        while engine.has_unfinished_requests() and deadline.remaining_s > 0:
            num_done += sum(output.finished for output in engine.step())
        seconds = time.perf_counter() - start
        engine.abort_request([str(i) for i in range(len(prompts))])
        stats, preemptions = engine.manager.stats(), engine.stats().preemptions
    return {
        "requests": num_done,
        "of": len(prompts),
        "seconds": round(seconds, 2),
        "requests_per_s": round(num_done / seconds, 2),
        "tokens_per_s": round(num_done * load.new_tokens / seconds, 1),
        "kv_gib": round((budget + rounding // 2) / 2**30, 3),
        "chunks_aliased": stats.chunks_aliased,
        "chunks_evicted": stats.chunks_evicted,
        "preemptions": sum(sum(by_reason.values()) for by_reason in preemptions.values()),
    }


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
    options = parse(__doc__, argv, seconds=200)
    deadline = Deadline(options.seconds)
    load = TOY if options.quick else PUBLISHED
    torch.set_grad_enabled(False)
    model = make_model(load.model, options.device, torch.bfloat16)
    budget = load.kv_bytes(kv_token_bytes(model.config, model.dtype.itemsize))
    rows: list[Row] = []
    body = {"rows": rows, "load": vars(load)}
    for variant in variants(load, quick=options.quick):
        if not deadline.passed(f"flexinfer: {variant}"):
            row = run_flexinfer(model, load, variant, budget, deadline)
            rows.append({"engine": "flexinfer", "layout": variant.layout, **row})
            keep(options, "full_budget", deadline, body)
        gc.collect()
    if not deadline.passed(RIVAL):
        row = {"engine": RIVAL, "layout": "pages"}
        try:
            row |= run_rival(model, load, budget, deadline, options.quick)
        except (RuntimeError, ValueError, ImportError) as error:  # a peer's failure is no fault
            row |= {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
        rows.append(row)
    columns = ["engine", "layout", "requests", "of", "seconds", "requests_per_s", "tokens_per_s"]
    columns += ["kv_gib", "chunks_aliased", "chunks_evicted", "preemptions", "failed"]
    finish(options, "full_budget", deadline, [table(rows, columns, "a full budget")], body)


if __name__ == "__main__":
    main()
