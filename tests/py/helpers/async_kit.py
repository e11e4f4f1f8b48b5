"""An AsyncLLM over the tiny Llama for the length of a scenario, and what must hold afterwards."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from flexinfer import AsyncLLM, RequestOutputKind, SamplingParams
from helpers.engine_kit import check_nothing_is_left
from helpers.tiny_models import make_model

GREEDY = SamplingParams(temperature=0, max_tokens=12)
LONG = SamplingParams(temperature=0, max_tokens=None, output_kind=RequestOutputKind.DELTA)
"""Goes on to the end of the context, some 250 steps."""
SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 16 << 20,
    "chunk_bytes": 4096,
    "enable_prefix_caching": False,
}


def with_llm(scenario: Callable[[AsyncLLM], Awaitable[None]], **settings: Any) -> None:
    """Run the scenario; afterwards nothing is left, and the thread ends."""

    async def main() -> None:
        async with AsyncLLM(make_model("llama"), **{**SETTINGS, **settings}) as llm:
            await scenario(llm)
            if llm.is_running:
                await llm.call(check_nothing_is_left)
        assert not llm.is_running
        assert "flexinfer-engine" not in {thread.name for thread in threading.enumerate()}

    asyncio.run(asyncio.wait_for(main(), 300))


async def until_idle(llm: AsyncLLM) -> None:
    while await llm.call(lambda engine: engine.has_unfinished_requests()):
        await asyncio.sleep(0.001)


async def last(outputs: Any) -> Any:
    final = None
    async for output in outputs:
        final = output
    return final
