"""A real server process, and Debian's headless Chromium in front of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from helpers.serving import ServerProcess

if TYPE_CHECKING:
    from selenium import webdriver

    from helpers.chat_page import ChatPage

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
SCREENSHOTS = Path(__file__).parents[3] / "build" / "screenshots"
ARGUMENTS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    "--force-prefers-reduced-motion",  # nothing is half there, or elsewhere, while it is looked at
)


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
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("no browser here: apt-get install chromium chromium-driver")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for argument in ARGUMENTS:
        options.add_argument(argument)
    with webdriver.Chrome(options=options, service=Service(DRIVER)) as browser:
        yield browser


@pytest.fixture
def page(
    driver: webdriver.Chrome, server: ServerProcess, request: pytest.FixtureRequest
) -> Iterator[ChatPage]:
    """The page, freshly opened on a wide screen, without anything that was said before.

    A screenshot is kept of how each test leaves it; anything on the console is a failure.
    """
    from helpers.chat_page import ChatPage

    chat = ChatPage(driver, server.url)
    chat.resize(1440, 900)
    chat.open_new()
    yield chat
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    driver.save_screenshot(str(SCREENSHOTS / f"{request.node.name}.png"))
    chat.emulate(dark=False)
    assert chat.console() == []
