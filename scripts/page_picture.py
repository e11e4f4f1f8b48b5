"""docs/images/page.png: the page with two running forks and what other clients left in the cache.

    PYTHONPATH=tests/py .venv/bin/python scripts/page_picture.py [FILE]

Needs the test extra and Chromium with its driver.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import httpx
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from helpers.chat_page import ChatPage
from helpers.serving import ServerProcess

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "page.png"
GUIDE = (
    "You are the guide of a small museum of ships, open from ten to five every day but Monday. "
    "Answer visitors in one short and friendly sentence, and never guess."
)
VISITORS = ("When do you open on Sunday?", "Which ship is the oldest?", "May I bring my dog?")


def main(file: Path) -> None:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    service = Service(shutil.which("chromedriver"))
    log = Path(tempfile.mkdtemp()) / "log"
    with (
        ServerProcess(log, "--kv-cache-memory-bytes", "32MiB") as server,
        webdriver.Chrome(options=options, service=service) as driver,
    ):
        server.wait_until_ready()
        ask_as_others(server.url)
        page = ChatPage(driver, server.url)
        page.resize(1440, 900)
        page.open_new()
        talk(page)
        driver.save_screenshot(str(file))
        driver.get("about:blank")
    print(f"{file}: {file.stat().st_size >> 10} KiB")


def ask_as_others(url: str) -> None:
    for question in VISITORS:
        messages = [{"role": "system", "content": GUIDE}, {"role": "user", "content": question}]
        body = {"messages": messages, "max_tokens": 16, "min_tokens": 16}
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status()


def talk(page: ChatPage) -> None:
    """A conversation and its fork, both running, and the mark of what is new faded again."""
    page.send("Hello! My name is Ada.")
    page.send("What is 17 plus 25?")
    page.click("Fork the conversation here")
    page.ask_for_long_answers()
    page.send("What is my name?", wait=False)
    page.all(".conversations .open")[0].click()
    page.send("Remember: my city is Rome.", wait=False)
    page.until(lambda: len(page.all(".row.live")) == 2 and len(page.all(".row.live .chunk")) > 40)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE)
