"""The engines that are compared, over one model in one process, each with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from device_models import graph_sizes
from workloads import Generate, Prompts, Sizes

from flexinfer import LLM, SamplingParams

PAGE_TOKENS = 256
"""Of transformers' continuous batching; a multiple of what its flash-attn path admits."""


class Meter:
    """The most KV memory that a workload held, in bytes; `reset()` between two workloads."""

    def __init__(self) -> None:
        self.peak_kv_bytes = 0
        self.forget: Callable[[], int] = lambda: 0
        """Gives the engine's cached memory back; returns the bytes that it still holds."""

    def reset(self) -> None:
        self.peak_kv_bytes = self.forget()

    def see(self, num_bytes: int) -> None:
        self.peak_kv_bytes = max(self.peak_kv_bytes, num_bytes)


def kv_token_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of one token's KV in all layers."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_layer = 2 * config.num_key_value_heads * head_dim * dtype.itemsize
    return int(config.num_hidden_layers * per_layer)


def kv_budget(model: Any, sizes: Sizes) -> int:
    """What a static reservation would take: every slot at its full length, and a half beyond.

    Both engines get it as their bound, so that neither preempts.
    """
    token = kv_token_bytes(model.config, model.dtype)
    return int(1.5 * sizes.max_requests * sizes.max_len * token) + (256 << 20)


@contextmanager
def flexinfer(model: Any, sizes: Sizes, meter: Meter, **settings: Any) -> Iterator[Generate]:
    """FlexInfer's engine, stepped here, so that memory is seen at every step."""
    llm = LLM(
        model,
        device=str(model.device),
        skip_tokenizer_init=True,
        max_model_len=sizes.max_len,
        max_num_seqs=sizes.max_requests,
        kv_cache_memory_bytes=kv_budget(model, sizes),
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
        while len(done) < len(ids):
            for output in engine.step():
                if output.finished:
                    done[output.request_id] = list(output.outputs[0].token_ids)
            meter.see(engine.manager.resident_bytes)
            if time.monotonic() > generate.deadline_s:  # type: ignore[attr-defined]
                engine.abort_request([i for i in ids if i not in done])
                raise TimeoutError(f"{len(done)} of {len(ids)} requests were done")
        return [done[request_id] for request_id in ids]

    generate.deadline_s = float("inf")  # type: ignore[attr-defined]
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
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    token = kv_token_bytes(model.config, model.dtype)
    page = PAGE_TOKENS if model.device.type == "cuda" else 32
    num_blocks = max(8, kv_budget(model, sizes) // token // page)
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(
            max_new_tokens=64, do_sample=False, eos_token_id=-1, pad_token_id=0, bos_token_id=1
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            allow_block_sharing=True,
            page_size=page,
            num_blocks=num_blocks,
            max_batch_tokens=2048 if model.device.type == "cuda" else 256,
        ),
    )
    manager.start()
    meter.forget = lambda: num_blocks * page * token

    def generate(prompts: Prompts, num_new: int) -> Prompts:
        ids = manager.add_requests(inputs=prompts, max_new_tokens=num_new)
        done: dict[str, list[int]] = {}
        while len(done) < len(ids):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(result.error)
                done[result.request_id] = list(result.generated_tokens)
            elif result is None and not manager.is_running():
                raise RuntimeError("transformers' continuous batching thread has ended")
            if time.monotonic() > generate.deadline_s:  # type: ignore[attr-defined]
                raise TimeoutError(f"{len(done)} of {len(ids)} requests were done")
        return [done[request_id] for request_id in ids]

    generate.deadline_s = float("inf")  # type: ignore[attr-defined]
    try:
        yield generate
    finally:
        manager.stop(block=True, timeout=5)


ENGINES = {
    "flexinfer": flexinfer,
    "transformers-continuous": transformers_continuous,
    "flexinfer, no sharing": flexinfer_no_sharing,
}
