"""Engines of the shipped model: one that prefills, one that decodes, one alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from flexinfer import LLM
    from flexinfer.async_llm import AsyncLLM
    from flexinfer.handover.planes import Peer


@pytest.fixture(scope="module")
def single() -> Iterator[LLM]:
    from flexinfer import LLM
    from flexinfer.cli.settings import SHIPPED_CHUNK_BYTES, SHIPPED_MODEL

    with LLM(
        str(SHIPPED_MODEL), chunk_bytes=SHIPPED_CHUNK_BYTES, kv_cache_memory_bytes=32 << 20
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def decoder() -> Iterator[AsyncLLM]:
    from helpers.serving import make_llm

    made = make_llm(role="decode")
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def prefiller() -> Iterator[AsyncLLM]:
    from helpers.serving import make_llm

    made = make_llm(role="prefill")
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def peers() -> Iterator[tuple[Peer, Peer]]:
    from helpers.gloo_pair import gloo_pair

    with gloo_pair() as made:
        yield made


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is given up because this machine is slow."""
    from flexinfer.server.handover import partner, prefiller
    from helpers.handover_servers import TIMEOUT_S

    monkeypatch.setattr(partner, "ACCEPT_TIMEOUT_S", TIMEOUT_S)
    monkeypatch.setattr(prefiller, "MESSAGE_TIMEOUT_S", TIMEOUT_S)
