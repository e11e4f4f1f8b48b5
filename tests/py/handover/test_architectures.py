"""Prefill there, decode here, by descriptors and over a network, whatever a model's layers keep:
tokens are those of transformers, and no token of a prompt is computed twice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("fastapi")

from flexinfer.async_llm import AsyncLLM
from flexinfer.server.handover.endpoints import Endpoint, LocalEndpoint, NetworkEndpoint
from flexinfer.server.handover.partner import PrefillPartner
from flexinfer.server.handover.prefiller import Prefiller
from helpers.free_port import free_port
from helpers.handover_servers import GREEDY, TIMEOUT_S, run_with
from helpers.hybrids import HYBRIDS, continuation, make_hybrid
from helpers.tiny_models import make_model, random_prompts, reference

pytestmark = pytest.mark.usefixtures("patience")

WAYS = ["descriptors", "network"]
NUM_NEW = GREEDY.max_tokens or 0


@pytest.fixture(params=WAYS)
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Endpoint:
    if request.param == "descriptors":
        return LocalEndpoint(tmp_path / "kv.sock")
    return NetworkEndpoint.of(f"127.0.0.1:{free_port()}", "known at both ends")


@contextmanager
def pair(model: Any, **settings: Any) -> Iterator[tuple[AsyncLLM, AsyncLLM]]:
    """One that prefills, one that decodes; nothing is left in either at the end."""
    given: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "kv_cache_memory_bytes": 8 << 20,
        "chunk_bytes": 4096,
        **settings,
    }
    made = [AsyncLLM(model, role=role, **given) for role in ("prefill", "decode")]
    try:
        yield made[0], made[1]
        for llm in made:
            asyncio.run(llm.call(lambda engine: engine.manager.check_integrity()))
            assert asyncio.run(llm.call(lambda e: e.manager.stats().num_vtensors)) == 0
    finally:
        for llm in made:
            llm.shutdown()


def handed_over(
    there: AsyncLLM, here: AsyncLLM, endpoint: Endpoint, *prompts: list[int]
) -> tuple[list[list[int]], PrefillPartner]:
    """Tokens for each prompt, and the partner that brought them."""
    partner = PrefillPartner(here, endpoint, TIMEOUT_S, 8)

    async def run() -> list[list[int]]:
        async with Prefiller(there, endpoint).serving():
            return await asyncio.to_thread(run_with, partner, here, *prompts)

    return asyncio.run(run()), partner


def num_prefilled(llm: AsyncLLM) -> int:
    return asyncio.run(llm.call(lambda engine: engine.step_totals.num_prefill_tokens))


@pytest.mark.parametrize("model", ["llama", "gemma3", "mistral", "gpt_oss"])
def test_tokens_are_those_of_transformers(model: str, endpoint: Endpoint) -> None:
    prompts = random_prompts((90, 57, 33))
    with pair(make_model(model)) as (there, here):
        found, partner = handed_over(there, here, endpoint, *prompts)
        assert not partner.stats.failures
        assert found == [reference(model, tuple(prompt), NUM_NEW) for prompt in prompts]
        assert num_prefilled(here) == len(prompts)  # the last token of each
        assert partner.stats.parcels_adopted == len(prompts)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_recurrent_state_goes_along(name: str, endpoint: Endpoint) -> None:
    prompts = random_prompts((90, 33))
    prompts.append([*prompts[0][:80], 5, 6, 7])  # finds the snapshot behind 64 of them there
    with pair(make_hybrid(name), state_snapshot_tokens=16) as (there, here):
        found, partner = handed_over(there, here, endpoint, *prompts)
        assert not partner.stats.failures
        assert found == [continuation(name, tuple(prompt), NUM_NEW) for prompt in prompts]
        assert num_prefilled(here) == len(prompts)
        assert partner.stats.parcels_adopted == len(prompts)
