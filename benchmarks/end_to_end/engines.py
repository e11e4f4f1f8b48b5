"""The engines that are compared, over one model in one process, each with a deadline."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

from card import shrink
from continuous_batching import ContinuousBatching, kv_token_bytes
from device_models import graph_sizes
from workloads import Generate, Prompts, Sizes

from flexinfer import LLM, SamplingParams

PAGE_TOKENS = 256
"""Of transformers' continuous batching; a multiple of what its flash-attn path admits."""


class Meter:
    """The most KV memory that a workload held, in bytes, and until when it may run; `reset()`
    between two workloads."""

    def __init__(self) -> None:
        self.peak_kv_bytes = 0
        self.deadline_s = float("inf")
        """On time.monotonic()'s clock."""
        self.forget: Callable[[], int] = lambda: 0
        """Gives the engine's cached memory back; returns the bytes that it still holds."""

    def reset(self) -> None:
        self.peak_kv_bytes = self.forget()

    def see(self, num_bytes: int) -> None:
        self.peak_kv_bytes = max(self.peak_kv_bytes, num_bytes)

    def check_time(self, num_done: int, num_requests: int) -> None:
        """Raises TimeoutError past the deadline."""
        if time.monotonic() > self.deadline_s:
            raise TimeoutError(f"{num_done} of {num_requests} requests were done")


def kv_budget(sizes: Sizes, token_bytes: int) -> int:
    """What a static reservation would take: every slot at its full length, and a half beyond.

    Both engines get it as their bound, so that neither preempts.
    """
    return int(1.5 * sizes.max_requests * sizes.max_len * token_bytes) + (256 << 20)


def fit_sizes(sizes: Sizes, token_bytes: int, usable: int | None) -> Sizes:
    """With so few requests at once that their budget fits into `usable` bytes."""
    return shrink(sizes, Sizes.halved, lambda one: kv_budget(one, token_bytes), usable)


@contextmanager
def flexinfer(model: Any, sizes: Sizes, meter: Meter, **settings: Any) -> Iterator[Generate]:
    """FlexInfer's engine, stepped here, so that memory is seen at every step."""
    llm = LLM(
        model,
        device=str(model.device),
        skip_tokenizer_init=True,
        max_model_len=sizes.max_len,
        max_num_seqs=sizes.max_requests,
        kv_cache_memory_bytes=kv_budget(sizes, kv_token_bytes(model.config, model.dtype.itemsize)),
        **graph_sizes((1, 2, 4, 8, 16)),
        **settings,
    )
    engine = llm.llm_engine
    count = 0

    def forget() -> int:
        engine.reset_prefix_cache()
        engine.manager.trim()
        return engine.manager.resident_bytes

    meter.forget = forget

    def generate(prompts: Prompts, num_new: int) -> Prompts:
        nonlocal count
        params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
        ids = [str(count + index) for index in range(len(prompts))]
        count += len(prompts)
        for request_id, prompt in zip(ids, prompts, strict=True):
            engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
        done: dict[str, list[int]] = {}
        try:
            while len(done) < len(ids):
                for output in engine.step():
                    if output.finished:
                        done[output.request_id] = list(output.outputs[0].token_ids)
                meter.see(engine.manager.resident_bytes)
                meter.check_time(len(done), len(ids))
        finally:
            engine.abort_request([i for i in ids if i not in done])
        return [done[request_id] for request_id in ids]

    try:
        yield generate
    finally:
        llm.close()


@contextmanager
def flexinfer_no_sharing(model: Any, sizes: Sizes, meter: Meter) -> Iterator[Generate]:
    """FlexInfer without its prefix cache: what sharing is worth."""
    with flexinfer(model, sizes, meter, enable_prefix_caching=False) as generate:
        yield generate


@contextmanager
def transformers_continuous(model: Any, sizes: Sizes, meter: Meter) -> Iterator[Generate]:
    """transformers' continuous batching: paged attention, block sharing on, a cache of one size."""
    is_cuda = model.device.type == "cuda"
    batching = ContinuousBatching(
        model,
        kv_bytes=kv_budget(sizes, kv_token_bytes(model.config, model.dtype.itemsize)),
        page_tokens=PAGE_TOKENS if is_cuda else 32,
        max_batch_tokens=2048 if is_cuda else 256,
    )
    meter.forget = lambda: batching.cache_bytes
    with closing(batching):
        yield partial(batching, on_poll=meter.check_time)


ENGINES = {
    "flexinfer": flexinfer,
    "transformers-continuous": transformers_continuous,
    "flexinfer, no sharing": flexinfer_no_sharing,
}
