"""What a page meets in the wild: long talks, failures, sleep, large maps, screen readers."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

pytest.importorskip("selenium")

from selenium.webdriver import ActionChains, Keys

from helpers.browser import axe_problems
from helpers.chat_page import ChatPage
from helpers.serving import ServerProcess

pytestmark = pytest.mark.browser

MARKDOWN = """# Title
Some **bold** and `code`.

```python
def double(x):
    return 2 * x
```

3. third
4. fourth
   - nested

| name | value |
|---|---|
| a | 1 |

> quoted

The <b>end</b>."""

ANSWER = """
const [status, headers, events, breaks] = arguments;
const real = window.realFetch ??= window.fetch;
window.fetch = async (path, options = {}) => {
  if (path !== "v1/chat/completions") return real(path, options);
  if (status !== 200) {
    return new Response(JSON.stringify({error: {message: events}}), {status, headers});
  }
  const encoder = new TextEncoder();
  return new Response(new ReadableStream({
    start(stream) {
      for (const event of events) {
        stream.enqueue(encoder.encode(`data: ${JSON.stringify(event)}\\n\\n`));
      }
      if (breaks) setTimeout(() => stream.error(new TypeError("network error")), 50);
      else {
        stream.enqueue(encoder.encode("data: [DONE]\\n\\n"));
        stream.close();
      }
    },
  }));
};
"""
"""Instead of the server's answer, what no small model can be made to say."""


def answer_with(page: ChatPage, *pieces: str, breaks: bool = False) -> None:
    events = [{"id": "x", "choices": [{"delta": {"content": piece}}]} for piece in pieces]
    page.driver.execute_script(ANSWER, 200, {}, events, breaks)


def answer_again(page: ChatPage) -> None:
    page.driver.execute_script("window.fetch = window.realFetch;")


def asked(page: ChatPage) -> None:
    """Keep what the model is asked in `window.asked`."""
    page.driver.execute_script(
        """window.asked = []; const real = window.fetch;
        window.fetch = (path, options = {}) => {
          if (path === "v1/chat/completions") window.asked.push(JSON.parse(options.body));
          return real(path, options);
        };"""
    )


def test_markdown_is_drawn_and_code_can_be_copied(page: ChatPage) -> None:
    answer_with(page, MARKDOWN)
    page.send("Show me")
    body = ".message.assistant .body"
    assert page.text(f"{body} [role=heading]") == "Title"
    assert page.text(f"{body} figure code") == "def double(x):\n    return 2 * x"
    assert page.find(f"{body} ol").get_attribute("start") == "3"
    assert page.text(f"{body} ol ul li") == "nested"
    assert page.texts(f"{body} td") == ["a", "1"]
    assert page.text(f"{body} blockquote") == "quoted"
    assert page.texts(f"{body} > p")[-1] == "The <b>end</b>.", "nothing is parsed as HTML"
    page.driver.execute_script(
        "navigator.clipboard.writeText = async text => { window.copied = text; };"
    )
    page.click("Copy the code")
    page.until(lambda: page.all('button[aria-label="Copied"]'))
    assert page.driver.execute_script("return window.copied") == "def double(x):\n    return 2 * x"


def test_text_that_came_in_pieces_is_drawn_as_if_in_one(page: ChatPage) -> None:
    answer_with(page, MARKDOWN)
    page.send("Show me")
    whole = page.find(".message.assistant .body").get_attribute("innerHTML")
    answer_with(page, *MARKDOWN)
    page.send("Once more")
    pieces = page.all(".message.assistant .body")[-1].get_attribute("innerHTML")
    assert pieces == whole


def test_five_hundred_messages(page: ChatPage) -> None:
    messages: list[dict[str, Any]] = []
    for i in range(250):
        messages.append({"role": "user", "content": f"Question {i}"})
        messages.append({"role": "assistant", "content": MARKDOWN, "state": "done"})
    record = {"id": "long", "title": "Long", "parentId": None, "system": "", "createdAt": 1}
    page.driver.execute_script(
        "localStorage.setItem('flexinfer.chat.long', arguments[0]); sessionStorage.clear();",
        json.dumps({**record, "version": 1, "messages": messages}),
    )
    page.driver.refresh()
    page.until(lambda: len(page.all(".message")) == 500)
    answer_with(page, "Fine.")
    page.driver.execute_script(
        """window.touched = 0;
        new MutationObserver(list => { window.touched += list.length; }).observe(
          document.querySelector(".messages"), {childList: true, subtree: true});"""
    )
    assert page.send("And now?") == "Fine."
    assert len(page.all(".message")) == 502
    assert page.driver.execute_script("return window.touched") < 60, "what was there stays as it is"
    log = "const log = document.querySelector('.messages');"
    page.until(
        lambda: page.driver.execute_script(
            f"{log} return log.scrollHeight - log.scrollTop - log.clientHeight < 5"
        )
    )


def test_too_many_requests_can_be_tried_again(page: ChatPage) -> None:
    page.driver.execute_script(ANSWER, 429, {"Retry-After": "1"}, "too many requests", False)
    page.find("#composer-text").send_keys("Hello! My name is Ada.", Keys.ENTER)
    page.until(lambda: "too many requests" in page.text(".message.failed .error"))
    answer_again(page)
    page.click_on(".message.failed .error button")
    assert "Ada" in page.answer()
    assert len(page.all(".message")) == 2


def test_a_connection_that_breaks_keeps_what_came(page: ChatPage) -> None:
    answer_with(page, "Half of", " it", breaks=True)
    page.find("#composer-text").send_keys("Hello! My name is Ada.", Keys.ENTER)
    page.until(lambda: page.all(".message.failed"))
    assert page.text(".message.failed .body") == "Half of it"
    assert "in the middle of the answer" in page.text(".message.failed .error")
    answer_again(page)
    asked(page)
    page.send("What is my name?")
    (request,) = page.driver.execute_script("return window.asked")
    roles = [message["role"] for message in request["messages"]]
    assert roles == ["system", "user"], "two messages of the user in a row are joined"
    assert request["messages"][-1]["content"] == "Hello! My name is Ada.\n\nWhat is my name?"


def test_a_server_that_goes_is_said_and_one_that_comes_is_found(page: ChatPage) -> None:
    page.set_offline(True)
    page.until(lambda: "does not answer" in page.text(".composer .notice"))
    page.find("#composer-text").send_keys("Hello! My name is Ada.", Keys.ENTER)
    page.until(lambda: page.all(".message.failed"))
    page.set_offline(False)
    page.until(lambda: not page.find(".composer .notice").is_displayed())
    page.click_on(".message.failed .error button")
    assert "Ada" in page.answer()
    assert all("ERR_" in entry for entry in page.console())


def test_an_engine_that_sleeps_is_said_and_woken(
    server_with_keys: ServerProcess, page: ChatPage
) -> None:
    other = ChatPage(page.driver, server_with_keys.url)
    other.driver.get(other.url)
    other.driver.execute_script(
        "sessionStorage.setItem('flexinfer.api-key', 'one');"
        "sessionStorage.setItem('flexinfer.admin-key', 'two');"
    )
    other.driver.refresh()
    other.until(lambda: other.text(".model"))
    other.console()
    admin = {"Authorization": "Bearer two"}
    httpx.post(f"{other.url}/admin/sleep", headers=admin, timeout=60).raise_for_status()
    other.until(lambda: "sleeps" in other.text("#memory .notice"))
    assert "sleeps" in other.text(".composer .notice")
    other.find("#composer-text").send_keys("Hello! My name is Ada.", Keys.ENTER)
    other.find("#memory .notice button").click()
    assert "Ada" in other.answer()
    other.until(lambda: not other.find(".composer .notice").is_displayed())


LARGE_MAP = """
const [vtensors, length] = arguments;
const real = window.fetch;
let etag = 0;
window.grow = 0;
window.fetch = async (path, options = {}) => {
  if (!path.startsWith("admin/memory")) return real(path, options);
  const map = await (await real(path, {...options, headers: {}})).json();
  map.num_planes = 4;
  map.groups = [{window: null, num_layers: 4, row_bytes: 4 * map.chunk_bytes}];
  map.vtensors = Array.from({length: vtensors}, (_, i) => ({
    id: i + 1, slot: i, state: "live", request_id: `request-${i}`, num_tokens: 600,
    num_cached_tokens: 60, mapped_tokens: 600, mapped_bytes: 1, chunks_aliased: 5,
    chunks_copied: 0, chunks: Array.from({length: length + (i === 0 ? window.grow : 0)},
      (_, j) => j < 5 ? j : 10 + i * 1000 + j)}));
  map.prefixes = [];
  map.chunks = [];
  return new Response(JSON.stringify(map), {headers: {ETag: `"${etag += 1}"`}});
};
"""


def test_two_hundred_requests_with_thousands_of_chunks(page: ChatPage) -> None:
    page.driver.execute_script(LARGE_MAP, 200, 60)
    page.until(lambda: page.text('.kind[data-kind="live"] .count') == "200")
    page.until(lambda: not page.all(".leaving, .grid .evicted"))  # rows of the tests before
    squares = page.driver.execute_script("return document.querySelectorAll('.chunk').length")
    assert squares < 6500, "a long row shows its first squares, and how many more there are"
    assert page.text(".row .more") == "+ 30"
    assert "4 planes" in page.find(".guide > p").get_attribute("textContent")
    # A map in which one row has grown by a chunk touches that row only.
    page.driver.execute_script(
        """window.rows = new Set();
        const grow = () => {
          if (document.querySelector(".cells .new")) { setTimeout(grow, 50); return; }
          new MutationObserver(list => list.forEach(({target}) => {
            const row = (target.closest ? target : target.parentElement).closest(".row");
            if (row) window.rows.add(row.dataset.key);
          })).observe(document.querySelector(".grid"),
            {childList: true, subtree: true, attributes: true});
          window.grow = 1;
        };
        grow();"""
    )
    page.until(lambda: page.text(".row .more") == "+ 31")
    assert page.driver.execute_script("return [...window.rows]") == ["v1"]


def test_the_guide_says_what_squares_mean_and_points_at_them(page: ChatPage) -> None:
    page.send("Hello! My name is Ada.")
    page.until(lambda: page.all("button.chunk"))
    assert "Same colour, same memory" in page.text(".guide")
    assert not page.find(".legend").is_displayed(), "the map comes first"
    page.find(".guide summary").click()
    words = page.texts(".legend b")
    assert words == [
        "own",
        "shared",
        "new",
        "copied",
        "evicted",
        "parked",
        "reserved",
        "given back",
    ]
    ActionChains(page.driver).move_to_element(page.all(".legend li")[0]).perform()
    page.until(lambda: page.find(".grid").get_attribute("data-only") == "own")
    page.driver.refresh()
    page.until(lambda: page.text(".model"))
    assert page.find(".legend").is_displayed(), "unfolded, it stays so"


def test_a_chunk_is_marked_in_all_its_rows_under_the_pointer(page: ChatPage) -> None:
    page.send("Hello! My name is Ada.")
    page.send("What is 17 plus 25?")
    page.click("Fork the conversation here", 0)
    page.send("What is my name?")
    page.until_nothing_runs()
    twins = page.driver.execute_script(
        """document.querySelector("button.chunk.shared").dispatchEvent(
          new PointerEvent("pointerover", {bubbles: true}));
        return [...document.querySelectorAll("button.chunk.twin")].map(twin => twin.dataset.id);"""
    )
    assert len(twins) > 1
    assert len(set(twins)) == 1


def test_a_whole_answer_is_told_to_screen_readers_once(page: ChatPage) -> None:
    page.driver.execute_script(
        """window.told = [];
        new MutationObserver(() => window.told.push(
          document.querySelector("#chat > [role=status]").textContent)
        ).observe(document.querySelector("#chat > [role=status]"), {childList: true});"""
    )
    answer = page.send("Hello! My name is Ada.")
    page.until(lambda: page.driver.execute_script("return window.told") == [answer])
    assert page.find(".messages").get_attribute("aria-live") == "off"


def test_by_keyboard_alone(page: ChatPage) -> None:
    def press(*keys: str) -> None:
        ActionChains(page.driver).send_keys(*keys).perform()

    press("Hello! My name is Ada.", Keys.ENTER)
    page.answer()
    ActionChains(page.driver).key_down(Keys.ALT).send_keys("n").key_up(Keys.ALT).perform()
    press("What is 17 plus 25?", Keys.ENTER)
    page.answer()
    delete = page.find('button[aria-label="Delete “Hello! My name is Ada.”"]')
    page.driver.execute_script("arguments[0].focus()", delete)
    press(Keys.ENTER)
    page.until(lambda: len(page.all(".conversations li")) == 1)
    focused = page.driver.switch_to.active_element
    assert focused.tag_name == "button", "the focus does not fall out of the list"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("phone", [False, True], ids=["wide", "phone"])
def test_axe_finds_nothing(page: ChatPage, dark: bool, phone: bool) -> None:
    page.emulate(dark=dark)
    answer_with(page, MARKDOWN)
    page.send("Show me")
    answer_again(page)
    page.send("Hello! My name is Ada.")
    page.click("Fork the conversation here")
    page.until_nothing_runs()
    found = []
    views = ["chat", "memory", "conversations"] if phone else ["chat"]
    if phone:
        page.resize(390, 844, phone=True)
    for view in views:
        if phone:
            page.click_on(f'#tabs [data-view="{view}"]')
        if view == "memory" or not phone:
            page.click_on("button.chunk")
        found += axe_problems(page.driver)
    assert found == []


SPOKEN_ANSWER = """
const real = window.fetch;
window.fetch = async (path, options = {}) => path !== "v1/chat/completions"
  ? real(path, options)
  : new Response(new ReadableStream({start(stream) {
      window.say = text => stream.enqueue(new TextEncoder().encode(
        `data: ${JSON.stringify({id: "x", choices: [{delta: {content: text}}]})}\n\n`));
    }}));
"""


def test_who_scrolls_up_is_not_taken_back_to_the_end(page: ChatPage) -> None:
    def say(text: str) -> None:
        page.driver.execute_script("window.say(arguments[0])", text)
        page.until(lambda: text.split()[-1] in page.text(".message.assistant .body", -1))

    def distance() -> float:
        px: float = page.driver.execute_script(
            """const log = document.querySelector(".messages");
            return log.scrollHeight - log.scrollTop - log.clientHeight;"""
        )
        return px

    page.driver.execute_script(SPOKEN_ANSWER)
    page.find("#composer-text").send_keys("Many lines", Keys.ENTER)
    page.until(lambda: page.driver.execute_script("return Boolean(window.say)"))
    say("\n\n".join(f"Line {i}" for i in range(80)))
    page.until(lambda: distance() < 5)
    page.driver.execute_script(
        """const log = document.querySelector(".messages");
        log.dispatchEvent(new WheelEvent("wheel", {deltaY: -500}));
        log.scrollTop -= 500;"""
    )
    say("\n\nOne more.")
    assert distance() > 400
    page.driver.execute_script("document.querySelector('.messages').scrollTop = 1e6")
    say("\n\nThe last.")
    page.until(lambda: distance() < 5)
    page.click("Stop")
