"""Debian's headless Chromium, and what its pages leave: pictures, and lines on the console."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

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


@contextmanager
def chromium() -> Iterator[webdriver.Chrome]:
    """Skips the test where there is none."""
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


@contextmanager
def fresh_page(driver: webdriver.Chrome, url: str, picture: str) -> Iterator[ChatPage]:
    """The page, freshly opened on a wide screen, without anything that was said before.

    A screenshot is kept of how it is left; anything on the console is a failure.
    """
    from helpers.chat_page import ChatPage

    chat = ChatPage(driver, url)
    chat.resize(1440, 900)
    chat.open_new()
    yield chat
    take_picture(driver, picture)
    chat.emulate(dark=False)
    assert chat.console() == []


def take_picture(driver: webdriver.Chrome, name: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    assert driver.save_screenshot(str(SCREENSHOTS / f"{name}.png"))


def axe_problems(driver: webdriver.Chrome) -> list[Any]:
    """What is inaccessible on the page. Skips the test where axe is not installed."""
    axe = pytest.importorskip("axe_core_python.selenium")
    return [
        (one["id"], node["html"][:160], node["failureSummary"][:200])
        for one in axe.Axe().run(driver)["violations"]
        for node in one["nodes"]
    ]
