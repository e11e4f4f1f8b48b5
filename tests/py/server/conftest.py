"""One real server process and one offline engine for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("openai")

import httpx
import openai

from flexinfer import LLM
from flexinfer.async_llm import AsyncLLM
from flexinfer.cli.settings import SHIPPED_CHUNK_BYTES, SHIPPED_MODEL
from helpers.serving import CONNECTIONS, ServerProcess, make_llm, serving, settings

ADMIN_KEY = "admin-secret"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """`flexinfer serve` with the shipped model, open, with an admin key."""
    folder: Path = tmp_path_factory.mktemp("server")
    with ServerProcess(
        folder / "log",
        *("--max-num-seqs", "8", "--kv-cache-memory-bytes", "64MiB", "--trace-dir", str(folder)),
        FLEXINFER_ADMIN_API_KEY=ADMIN_KEY,
        FLEXINFER_LOG_FORMAT="json",
    ) as process:
        yield process.wait_until_ready()


@pytest.fixture(scope="session")
def client(server: ServerProcess) -> openai.OpenAI:
    http = openai.DefaultHttpxClient(limits=CONNECTIONS)
    url = f"{server.url}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=http)


@pytest.fixture(scope="session")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60, limits=CONNECTIONS) as client:
        yield client


@pytest.fixture(scope="session")
def admin(server: ServerProcess) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    with httpx.Client(
        base_url=server.url, timeout=60, limits=CONNECTIONS, headers=headers
    ) as client:
        yield client


@pytest.fixture(scope="session")
def offline() -> Iterator[LLM]:
    """The same model without a server: what it says is what the server must say."""
    with LLM(
        str(SHIPPED_MODEL), chunk_bytes=SHIPPED_CHUNK_BYTES, kv_cache_memory_bytes=32 << 20
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    """An engine for servers in threads. Its thread ends with the module: others count threads."""
    made = make_llm()
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def scripted(llm: AsyncLLM) -> Iterator[str]:
    """The URL of a server whose model a test may make say what it wants (helpers/scripted.py)."""
    with serving(llm, settings()) as url:
        yield url
