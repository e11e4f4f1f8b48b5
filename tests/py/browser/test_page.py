"""The page in a real browser, in front of a real server and a real model."""

from __future__ import annotations

import httpx
import pytest

pytest.importorskip("selenium")

from selenium.webdriver import Keys

from helpers.chat_page import ChatPage
from helpers.serving import ServerProcess

pytestmark = pytest.mark.browser


def test_a_message_gets_an_answer_that_streams(page: ChatPage) -> None:
    page.draw_piece_by_piece()
    page.driver.execute_script(
        """window.seen = new Set();
        new MutationObserver(() => {
          const body = document.querySelector(".message.assistant .body");
          if (body) window.seen.add(body.textContent);
        }).observe(document.querySelector(".messages"), {childList: true, subtree: true});"""
    )
    assert "Ada" in page.send("Hello! My name is Ada.")
    seen = page.driver.execute_script("return [...window.seen]")
    whole = max(seen, key=len)
    assert any(0 < len(text) < len(whole) for text in seen), "the answer came in one piece"
    assert "prompt tokens from the cache" in page.text(".message.assistant .facts")


@pytest.mark.parametrize(("total_ms", "shown"), [(1100, "9 per second"), (100.2, "")])
def test_a_rate_is_shown_only_where_there_was_time_to_measure(
    total_ms: float, shown: str, page: ChatPage
) -> None:
    facts = page.driver.execute_async_script(
        """const [message, done] = arguments;
        import("/static/js/message-view.js").then((module) => done(module.factsOf(message)));""",
        {"tokens": 10, "firstMs": 100, "totalMs": total_ms},
    )
    assert shown in facts
    assert bool(shown) == ("per second" in facts)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_what_can_be_done_with_an_answer_is_seen_without_pointing_at_it(
    page: ChatPage, dark: bool
) -> None:
    """Its icons stand out as text must, by WCAG's contrast of luminances."""
    page.emulate(dark=dark)
    page.send("Hello!")
    contrasts = page.driver.execute_script(
        """const rgb = color => color.match(/[\\d.]+/g).slice(0, 3).map(Number);
        const light = color => rgb(color).map(value => value / 255).map(
          value => value <= .04045 ? value / 12.92 : ((value + .055) / 1.055) ** 2.4
        ).reduce((sum, value, i) => sum + value * [.2126, .7152, .0722][i], 0);
        const behind = element => {
          const color = getComputedStyle(element).backgroundColor;
          return color === "rgba(0, 0, 0, 0)" ? behind(element.parentElement) : color;
        };
        return [...document.querySelectorAll(".message.assistant .actions svg")].map(icon => {
          if (!icon.checkVisibility({opacityProperty: true})) return 0;
          const both = [getComputedStyle(icon).stroke, behind(icon)].map(light);
          return (Math.max(...both) + .05) / (Math.min(...both) + .05);
        });"""
    )
    assert len(contrasts) == 3
    assert min(contrasts) >= 4.5


def test_an_answer_can_be_stopped(page: ChatPage) -> None:
    page.ask_for_long_answers()
    page.send("Hello!", wait=False)
    page.click("Stop")
    page.until(lambda: page.all(".message.assistant.stopped"))
    page.until(lambda: page.all('button[aria-label="Send"]'))
    page.until_nothing_runs()


def test_escape_stops_too(page: ChatPage) -> None:
    page.ask_for_long_answers()
    page.send("Hello!", wait=False)
    page.find("#composer-text").send_keys(Keys.ESCAPE)
    page.until(lambda: page.all(".message.assistant.stopped"))


def test_regenerate_replaces_the_last_answer_by_a_sampled_one(page: ChatPage) -> None:
    page.send("Hello! My name is Ada.")
    page.driver.execute_script(
        """window.asked = []; const real = window.fetch;
        window.fetch = (path, options = {}) => {
          if (path !== "v1/chat/completions") return real(path, options);
          const body = JSON.parse(options.body);
          window.asked.push(body);  // and answered greedily: a sample may be empty
          return real(path, {...options, body: JSON.stringify({...body, temperature: 0})});
        };"""
    )
    page.click("Regenerate the answer")
    assert page.answer()
    assert len(page.all(".message")) == 2
    (asked,) = page.driver.execute_script("return window.asked")
    assert asked["temperature"] > 0, "greedy, it would be the same again"
    assert "seed" not in asked
    assert [message["role"] for message in asked["messages"]] == ["system", "user"]


def test_an_answer_cut_off_by_leaving_the_page_is_a_stopped_one(page: ChatPage) -> None:
    page.ask_for_long_answers()
    page.send("Hello! My name is Ada.", wait=False)
    page.until(lambda: page.text(".message.assistant .body", -1))
    page.driver.refresh()
    page.until(lambda: page.all(".message.assistant.stopped"))
    assert not page.all(".message.streaming")
    assert page.text(".message.assistant .body", -1), "what was said is kept"
    page.until_nothing_runs()


def test_evicted_chunks_are_seen_to_go(page: ChatPage, server: ServerProcess) -> None:
    page.send("Hello! My name is Ada.")
    page.until(lambda: [row for row in page.rows() if row["kind"] == "cached"])
    page.driver.execute_script(
        """window.gone = 0;
        new MutationObserver(() => {
          window.gone = Math.max(window.gone, document.querySelectorAll(".cells .evicted").length);
        }).observe(document.querySelector(".grid"), {childList: true, subtree: true});"""
    )
    for i in range(3):  # more than the prefix cache may keep
        long = {"prompt": [100 + i] * 900, "max_tokens": 1}
        httpx.post(f"{server.url}/v1/completions", json=long, timeout=60).raise_for_status()
    page.until(lambda: page.driver.execute_script("return window.gone"))
    page.until(lambda: not page.all(".cells .evicted"))
    assert "evicted" in page.text(".ticker")


def test_a_fork_shares_the_chunks_of_its_prefix(page: ChatPage) -> None:
    page.send("Hello! My name is Ada.")
    page.send("What is 17 plus 25?")
    page.click("Fork the conversation here")
    assert len(page.all(".conversations li")) == 2
    assert "Ada" in page.send("What is my name?")
    page.click_on(".conversations .open")
    page.send("Remember: my city is Rome.")
    page.until_nothing_runs()

    def shared() -> bool:
        rows = [row for row in page.rows() if row["kind"] == "cached"]
        holders: dict[str, list[tuple[str, str]]] = {}
        for row in rows:
            for chunk, hue in row["chunks"]:
                holders.setdefault(chunk, []).append((row["label"], hue))
        several = [rows for rows in holders.values() if len(rows) > 1]
        same_colour = all(len({hue for _, hue in rows}) == 1 for rows in several)
        return len(several) >= 2 and same_colour and all(rows[0][1] != "null" for rows in several)

    page.until(shared)
    page.click_on("button.chunk.shared")
    assert "Shared by" in page.text(".detail")
    assert "Only the prefix cache holds it" in page.text(".detail")
    assert page.text('[data-figure="saved"] dd') != "0 B"


def test_running_requests_share_chunks_while_they_run(page: ChatPage) -> None:
    page.send("Hello! My name is Ada.")
    page.click("Fork the conversation here")
    page.ask_for_long_answers()
    page.send("What is my name?", wait=False)
    page.click_on(".conversations .open")
    page.send("What is 17 plus 25?", wait=False)

    def two_live_rows() -> bool:
        live = [row for row in page.rows() if row["kind"] == "live"]
        return len(live) == 2 and bool(
            {chunk for chunk, _ in live[0]["chunks"]} & {chunk for chunk, _ in live[1]["chunks"]}
        )

    page.until(two_live_rows)
    page.until(lambda: page.all(".chunk.reserved"))
    page.until(lambda: "chunk" in page.text(".ticker"))


def test_conversations_are_kept_and_deleted(page: ChatPage) -> None:
    page.send("Hello! My name is Ada.")
    page.find(".new").click()
    page.send("What is 2 plus 3?")
    page.driver.refresh()
    page.until(lambda: len(page.all(".conversations li")) == 2)
    assert page.texts(".message.user .body") == ["What is 2 plus 3?"]
    page.click("Delete “What is 2 plus 3?”")
    assert page.texts(".conversations .title") == ["Hello! My name is Ada."]


def test_settings_reach_the_model(page: ChatPage) -> None:
    page.find(".open-settings").click()
    tokens = page.find("#set-max_tokens")
    tokens.clear()
    tokens.send_keys("3")
    page.find(".settings .primary").click()
    page.send("Hello! My name is Ada.")
    assert "cut at the token limit" in page.text(".message.assistant .facts")


def test_a_server_that_asks_for_keys(server_with_keys: ServerProcess, page: ChatPage) -> None:
    guarded = ChatPage(page.driver, server_with_keys.url)
    guarded.open_new()
    guarded.until(lambda: guarded.find("#set-api-key") == page.driver.switch_to.active_element)
    guarded.find("#set-api-key").send_keys("one")
    guarded.find("#set-admin-key").send_keys("two")
    guarded.find(".settings .primary").click()
    assert guarded.send("Hello! My name is Ada.")
    assert guarded.texts(".message.user .body") == ["Hello! My name is Ada."]
    guarded.until(guarded.rows)
    refused = guarded.console()  # each 401 before the keys were there
    assert all("401" in entry for entry in refused)


def test_markup_in_a_message_stays_text(page: ChatPage) -> None:
    page.send("<img src=x onerror=alert(1)> **b**")
    assert page.texts(".message.user .body") == ["<img src=x onerror=alert(1)> **b**"]
    assert not page.all(".messages img")


def test_the_map_by_keyboard(page: ChatPage) -> None:
    page.send("Hello! My name is Ada.")
    page.until_nothing_runs()
    page.driver.execute_script("document.querySelector('.row button').focus()")
    active = page.driver.switch_to.active_element
    active.send_keys(Keys.ARROW_RIGHT)
    second = page.driver.switch_to.active_element
    assert second.get_attribute("data-id") == page.rows()[0]["chunks"][1][0]
    second.send_keys(Keys.ENTER)
    assert page.text(".detail h3") == f"Chunk {page.rows()[0]['chunks'][1][0]}"
    second.send_keys(Keys.ESCAPE)
    page.until(lambda: not page.find(".detail").is_displayed())
    assert len(page.all('.grid button[tabindex="0"]')) == 1


def test_on_a_phone_one_pane_at_a_time(page: ChatPage) -> None:
    page.resize(390, 844, phone=True)
    page.send("Hello! My name is Ada.")
    assert not page.find("#memory").is_displayed()
    page.find('#tabs [data-view="memory"]').click()
    assert page.find("#memory").is_displayed()
    assert not page.find("#chat").is_displayed()
    page.until(lambda: page.all("button.chunk"))
    width = page.driver.execute_script("return document.documentElement.scrollWidth")
    assert width <= 390, "nothing is cut off at the side"


def test_dark(page: ChatPage) -> None:
    page.emulate(dark=True)
    page.send("Hello! My name is Ada.")
    colour = page.driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    red = int(colour.removeprefix("rgb(").split(",")[0])
    assert red < 60


def test_nothing_comes_from_elsewhere(page: ChatPage) -> None:
    page.send("Hello!")
    names = page.driver.execute_script(
        "return performance.getEntriesByType('resource').map(entry => entry.name)"
    )
    assert names
    assert all(name.startswith(page.url) for name in names)
    policy = httpx.get(page.url, timeout=60).headers["content-security-policy"]
    assert "default-src 'self'" in policy
