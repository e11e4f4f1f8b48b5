"""ChatPage: the page as a person uses it, over selenium."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from selenium.common.exceptions import (
    ElementClickInterceptedException,
    ElementNotInteractableException,
    NoSuchElementException,
    StaleElementReferenceException,
    WebDriverException,
)
from selenium.webdriver import Chrome, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

LONG_ANSWERS = """
const real = window.fetch;
window.fetch = async (path, options = {}) => {
  if (path !== "v1/chat/completions") return real(path, options);
  const body = { ...JSON.parse(options.body), min_tokens: 1500, max_completion_tokens: 1500 };
  const response = await real(path, { ...options, body: JSON.stringify(body) });
  const stopped = new Promise(resolve => options.signal.addEventListener("abort", resolve));
  const decoder = new TextDecoder();
  let read = "";
  const transform = async (bytes, stream) => {
    if (/"content":"[^"]/.test(read)) await stopped;
    read += decoder.decode(bytes, { stream: true });
    stream.enqueue(bytes);
  };
  return new Response(response.body.pipeThrough(new TransformStream({ transform })), response);
};
"""
"""The shipped model answers in a few words, too soon to stop it or to look at its memory. This page
asks for long answers, and reads no more than their first words until it is stopped."""

PIECE_BY_PIECE = """
const real = window.fetch;
window.fetch = async (path, options = {}) => {
  const response = await real(path, options);
  if (path !== "v1/chat/completions") return response;
  const [decoder, encoder] = [new TextDecoder(), new TextEncoder()];
  const frame = () => new Promise(requestAnimationFrame);
  let rest = "";
  const transform = async (bytes, stream) => {
    const events = (rest + decoder.decode(bytes, { stream: true })).split("\\n\\n");
    rest = events.pop();
    for (const event of events) {
      stream.enqueue(encoder.encode(`${event}\\n\\n`));
      await frame();
      await frame();
    }
  };
  return new Response(response.body.pipeThrough(new TransformStream({ transform })), response);
};
"""
"""On a busy machine all of an answer may have come when the page gets to draw. This page reads no
further before it has."""

TEXTS = """return [...document.querySelectorAll(arguments[0])].slice(arguments[1]).map(
  element => element.checkVisibility() ? element.innerText.trim() : "")"""
"""As a person reads them. Found and read in one go: the page draws its rows anew meanwhile."""

LOOK = """performance.clearResourceTimings();
document.dispatchEvent(new Event("visibilitychange"));"""
HAS_LOOKED = """return performance.getEntriesByType("resource").some(
  entry => entry.name.includes("admin/memory"))"""

CLICK_FAILURES: tuple[type[WebDriverException], ...] = (
    NoSuchElementException,
    StaleElementReferenceException,
    ElementNotInteractableException,
    ElementClickInterceptedException,
)
"""Nothing has been clicked: the page has drawn or moved the element since it was found."""


class ChatPage:
    def __init__(self, driver: Chrome, url: str) -> None:
        self.driver = driver
        self.url = url

    def open_new(self) -> None:
        self.driver.get(self.url)
        self.driver.execute_script("localStorage.clear(); sessionStorage.clear();")
        self.driver.refresh()
        self.until(lambda: self.text(".model"))
        self.console()

    def resize(self, width: int, height: int, *, phone: bool = False) -> None:
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone},
        )
        size = "return [outerWidth, outerHeight]" if phone else "return [innerWidth, innerHeight]"
        self.until(lambda: self.driver.execute_script(size) == [width, height])

    def emulate(self, *, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def ask_for_long_answers(self) -> None:
        self.driver.execute_script(LONG_ANSWERS)

    def draw_piece_by_piece(self) -> None:
        self.driver.execute_script(PIECE_BY_PIECE)

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str, which: int = 0) -> str:
        found: list[str] = self.driver.execute_script(TEXTS, selector, which)
        if not found:
            raise NoSuchElementException(selector)
        return found[0]

    def texts(self, selector: str) -> list[str]:
        found: list[str] = self.driver.execute_script(TEXTS, selector, 0)
        return found

    def set_offline(self, offline: bool) -> None:
        conditions = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        self.driver.execute_cdp_cmd("Network.enable", {})
        self.driver.execute_cdp_cmd(
            "Network.emulateNetworkConditions", {"offline": offline, **conditions}
        )

    def click(self, label: str, which: int = -1) -> None:
        """The button that a screen reader calls `label`."""
        self.click_on(f'button[aria-label="{label}"]', which)

    def click_on(self, selector: str, which: int = 0) -> None:
        def is_clicked() -> bool:
            found = self.all(selector)
            if not found:
                return False
            found[which].click()
            return True

        self.until(is_clicked)

    def send(self, text: str, *, wait: bool = True) -> str:
        """Type and press Enter; returns the answer."""
        self.find("#composer-text").send_keys(text, Keys.ENTER)
        if not wait:
            self.until(lambda: self.all(".message.streaming"))
            return ""
        return self.answer()

    def answer(self) -> str:
        """The last answer, once it is whole; not the empty one."""
        self.until(lambda: self.all(".message.assistant.done:last-child"))
        text: str = self.until(lambda: self.text(".message.assistant .body", -1))  # is in view
        return text

    def look(self) -> None:
        """Until the map is drawn that the server shows now.

        Of three looks the first may be over, and the last is begun when the second is drawn."""
        for _ in range(3):
            self.driver.execute_script(LOOK)
            self.until(lambda: self.driver.execute_script(HAS_LOOKED))

    def until_nothing_runs(self) -> None:
        """From then on the rows of the map stay as they are."""

        def is_at_rest() -> bool:
            self.look()
            return not any(row["kind"] == "live" for row in self.rows())

        self.until(is_at_rest)

    def rows(self) -> list[dict[str, Any]]:
        """The map as it is drawn: kind, label and [chunk id, hue or "null"] of each row."""
        found: list[dict[str, Any]] = self.driver.execute_script(
            """return [...document.querySelectorAll(".row:not(.leaving)")].map(row => ({
                 kind: row.classList[1], label: row.querySelector("b").textContent,
                 chunks: [...row.querySelectorAll("button")].map(
                   button => [button.dataset.id, button.dataset.hue])}))"""
        )
        return found

    def until(self, condition: Callable[[], Any], timeout_s: float = 120) -> Any:
        wait = WebDriverWait(self.driver, timeout_s, 0.05, ignored_exceptions=CLICK_FAILURES)
        return wait.until(lambda _: condition())

    def console(self) -> list[str]:
        """What the browser's console got since the last call."""
        return [json.dumps(entry) for entry in self.driver.get_log("browser")]
