"""A real server process, and Debian's headless Chromium in front of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from helpers.browser import chromium, fresh_page
from helpers.serving import ServerProcess

if TYPE_CHECKING:
    from selenium import webdriver

    from helpers.chat_page import ChatPage


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """`flexinfer serve` with the shipped model and no keys: the page needs none."""
    folder = tmp_path_factory.mktemp("server")
    arguments = ("--max-num-seqs", "8", "--kv-cache-memory-bytes", "32MiB")
    with ServerProcess(folder / "log", *arguments) as process:
        yield process.wait_until_ready()


@pytest.fixture(scope="session")
def server_with_keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The same, asking for a key, and for another one under /admin."""
    keys = ("--api-key", "one", "--admin-api-key", "two")
    with ServerProcess(tmp_path_factory.mktemp("server_with_keys") / "log", *keys) as process:
        yield process.wait_until_ready()


@pytest.fixture(scope="session")
def driver() -> Iterator[webdriver.Chrome]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(
    driver: webdriver.Chrome, server: ServerProcess, request: pytest.FixtureRequest
) -> Iterator[ChatPage]:
    with fresh_page(driver, server.url, request.node.name) as chat:
        yield chat
