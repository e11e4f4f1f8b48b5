"""ContinuousBatching: transformers' own serving loop, with paged attention and shared blocks.

A peer in benchmarks/serving and benchmarks/end_to_end. Imports transformers only when it is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

Prompts = list[list[int]]


def kv_token_bytes(config: Any, element_bytes: int) -> int:
    """Bytes of one token's K and V in all layers of a transformers config."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(config.num_hidden_layers * 2 * config.num_key_value_heads * head_dim * element_bytes)


def page_size_name(config_type: type) -> str:
    """What transformers calls a page's tokens: `block_size` in 5.17, `page_size` in 5.23."""
    names = {field.name for field in dataclasses.fields(config_type)}
    return "page_size" if "page_size" in names else "block_size"


class ContinuousBatching:
    """Greedy generation, end of text ignored. One thread of transformers' own runs the model."""

    def __init__(
        self,
        model: Any,
        *,
        kv_bytes: int,
        page_tokens: int,
        max_batch_tokens: int,
        pad_token_id: int = 0,
        poll_s: float = 1.0,
    ) -> None:
        """kv_bytes: of the paged cache, which is allocated now. poll_s: how often `on_poll` of a
        call is heard while no request ends."""
        from transformers import GenerationConfig
        from transformers.generation import ContinuousBatchingConfig

        page_bytes = page_tokens * kv_token_bytes(model.config, model.dtype.itemsize)
        num_blocks = max(8, kv_bytes // page_bytes)
        self.cache_bytes = num_blocks * page_bytes
        self._poll_s = poll_s
        self._manager = model.init_continuous_batching(
            generation_config=GenerationConfig(
                max_new_tokens=64,
                do_sample=False,
                eos_token_id=-1,
                pad_token_id=pad_token_id,
                bos_token_id=1,
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                allow_block_sharing=True,
                num_blocks=num_blocks,
                max_batch_tokens=max_batch_tokens,
                **{page_size_name(ContinuousBatchingConfig): page_tokens},
            ),
        )
        self._manager.start()

    def __call__(
        self,
        prompts: Prompts,
        num_new: int,
        on_poll: Callable[[int, int], None] = lambda num_done, num_requests: None,
    ) -> Prompts:
        """`num_new` tokens for each prompt. `on_poll` may raise to give up.

        Raises RuntimeError if a request fails or transformers' thread has ended.
        """
        ids = self._manager.add_requests(inputs=prompts, max_new_tokens=num_new)
        done: Any = {}
        while len(done) < len(ids):
            result = self._manager.get_result(timeout=self._poll_s)
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(result.error)
                done[result.request_id] = list(result.generated_tokens)
            elif result is None and not self._manager.is_running():
                raise RuntimeError("transformers' continuous batching thread has ended")
            on_poll(len(done), len(ids))
        return [done[request_id] for request_id in ids]

    def close(self) -> None:
        self._manager.stop(block=True, timeout=5)
