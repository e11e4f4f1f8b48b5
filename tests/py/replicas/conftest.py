"""Two replicas of the shipped model and an adapter on a real cluster of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from helpers.browser import chromium
from helpers.lora_kit import save_shipped_adapter
from helpers.replica_servers import client_of, serving_replicas


@pytest.fixture(scope="session")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_shipped_adapter(tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory, adapter: Path) -> Iterator[str]:
    """The URL of `flexinfer serve --replicas 2`."""
    pytest.importorskip("ray", reason="replicas need Ray: make test-replicas installs it")
    modules = ("--enable-lora", "--lora-modules", f"other={adapter}")
    with serving_replicas(tmp_path_factory.mktemp("ray"), *modules) as url:
        yield url


@pytest.fixture(scope="session")
def client(served: str) -> openai.OpenAI:
    return client_of(served)


@pytest.fixture(scope="session")
def driver() -> Iterator[object]:
    with chromium() as browser:
        yield browser
