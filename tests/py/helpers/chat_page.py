"""ChatPage: the page as a person uses it, over selenium."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from selenium.common.exceptions import StaleElementReferenceException
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

TEXTS = """return [...arguments].map(
  element => element.checkVisibility() ? element.innerText.trim() : "")"""


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

    def emulate(self, *, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def ask_for_long_answers(self) -> None:
        self.driver.execute_script(LONG_ANSWERS)

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return self._read(self.find(selector))[0]

    def texts(self, selector: str) -> list[str]:
        return self._read(*self.all(selector))

    def _read(self, *elements: WebElement) -> list[str]:
        """As a person reads them, once they have appeared: selenium's own `text` of a row that is
        at the start of its animation, and transparent, is empty."""
        found: list[str] = self.driver.execute_script(TEXTS, *elements)
        return found

    def set_offline(self, offline: bool) -> None:
        conditions = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        self.driver.execute_cdp_cmd("Network.enable", {})
        self.driver.execute_cdp_cmd(
            "Network.emulateNetworkConditions", {"offline": offline, **conditions}
        )

    def click(self, label: str, which: int = -1) -> None:
        """The button that a screen reader calls `label`."""
        self.all(f'button[aria-label="{label}"]')[which].click()

    def send(self, text: str, *, wait: bool = True) -> str:
        """Type and press Enter; returns the answer."""
        self.find("#composer-text").send_keys(text, Keys.ENTER)
        if not wait:
            self.until(lambda: self.all(".message.streaming"))
            return ""
        return self.answer()

    def answer(self) -> str:
        """The last answer, once it is whole."""
        self.until(lambda: self.all(".message.assistant.done:last-child"))
        return self.all(".message.assistant .body")[-1].text  # the text of each costs 0.4 s

    def rows(self) -> list[dict[str, Any]]:
        """The map as it is drawn: kind, label and [chunk id, hue or "null"] of each row."""
        found: list[dict[str, Any]] = self.driver.execute_script(
            """return [...document.querySelectorAll(".row:not(.leaving)")].map(row => ({
                 kind: row.classList[1], label: row.querySelector("b").textContent,
                 chunks: [...row.querySelectorAll("button")].map(
                   button => [button.dataset.id, button.dataset.hue])}))"""
        )
        return found

    def until(self, condition: Callable[[], Any], timeout_s: float = 30) -> Any:
        wait = WebDriverWait(
            self.driver, timeout_s, 0.05, ignored_exceptions=[StaleElementReferenceException]
        )
        return wait.until(lambda _: condition())

    def console(self) -> list[str]:
        """What the browser's console got since the last call."""
        return [json.dumps(entry) for entry in self.driver.get_log("browser")]
