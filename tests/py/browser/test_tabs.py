"""Two tabs of one browser: each shows what the other says, and neither writes it away."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("selenium")

from helpers.chat_page import ChatPage

pytestmark = pytest.mark.browser

DEAF = """
const before = {...localStorage};
window.realGet = Storage.prototype.getItem;
Storage.prototype.getItem = function (key) {
  return key.startsWith("flexinfer.") ? before[key] ?? null : window.realGet.call(this, key);
};
"""
"""What the other tab writes is still on its way: as if both had asked in the same millisecond."""
HEARING = "Storage.prototype.getItem = window.realGet;"


class Tab(ChatPage):
    """A ChatPage in a window of its own, made the active one by `with`."""

    def __init__(self, page: ChatPage) -> None:
        super().__init__(page.driver, page.url)
        self.handle = page.driver.current_window_handle

    def __enter__(self) -> Tab:
        self.driver.switch_to.window(self.handle)
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def open_conversation(self, title: str) -> None:
        def opened() -> bool:
            for button in self.all(".conversations .open"):
                if title in button.text:
                    button.click()
                    return True
            return False

        self.until(opened)

    def kept(self) -> list[dict[str, Any]]:
        """The records of all conversations."""
        found: str = self.driver.execute_script(
            """return JSON.stringify(Object.keys(localStorage)
                 .filter(key => key.startsWith("flexinfer.chat."))
                 .map(key => JSON.parse(localStorage.getItem(key))))"""
        )
        records: list[dict[str, Any]] = json.loads(found)
        return records


@pytest.fixture
def tabs(page: ChatPage) -> Iterator[tuple[Tab, Tab]]:
    first = Tab(page)
    page.driver.switch_to.new_window("window")
    second = Tab(page)
    second.resize(1440, 900)
    second.driver.get(page.url)
    second.until(lambda: second.text(".model"))
    first.driver.switch_to.window(first.handle)
    yield first, second
    with second:
        console = second.console()
        second.driver.close()
    first.driver.switch_to.window(first.handle)
    assert console == []


def said(tab: Tab) -> list[str]:
    return tab.texts(".message.user .body")


def test_both_keep_what_both_say(tabs: tuple[Tab, Tab]) -> None:
    one, two = tabs
    with one:
        one.send("Hello! My name is Ada.")
    with two:
        two.send("What is 17 plus 25?")
    for tab in tabs:
        with tab:
            tab.until(lambda tab=tab: len(tab.all(".conversations li")) == 2)
            tab.driver.refresh()
            tab.until(lambda tab=tab: len(tab.all(".conversations li")) == 2)
    with two:
        assert said(two) == ["What is 17 plus 25?"], "each tab stays in its own conversation"
        two.open_conversation("Hello! My name is Ada.")
        assert "Ada" in two.answer()


def test_an_answer_is_seen_in_the_other_tab_and_can_be_stopped_there(
    tabs: tuple[Tab, Tab],
) -> None:
    one, two = tabs
    with one:
        one.ask_for_long_answers()
        one.send("Hello!", wait=False)
    with two:
        two.open_conversation("Hello!")
        two.until(lambda: two.all(".message.assistant.streaming"))
        two.find("#composer-text").send_keys("Me too!\n")
        assert said(two) == ["Hello!"], "one answer at a time, whoever asked"
        two.click("Stop")
        two.until(lambda: two.all(".message.assistant.stopped"))
    with one:
        one.until(lambda: one.all(".message.assistant.stopped"))
        assert one.text(".message.assistant .body", -1)


def test_the_other_tab_goes_on_where_this_one_ended(tabs: tuple[Tab, Tab]) -> None:
    one, two = tabs
    with one:
        one.send("Hello! My name is Ada.")
    with two:
        two.open_conversation("Hello!")
        assert "Ada" in two.answer()  # it is heard a little later than said
        assert "Ada" in two.send("What is my name?")
    with one:
        one.until(lambda: len(one.all(".message.done")) == 2)
        one.send("What is 17 plus 25?")
    with two:
        two.until(lambda: len(two.all(".message.done")) == 3)
        (record,) = two.kept()
    assert len(record["messages"]) == 6
    assert record["answering"] is None


def test_a_deletion_wins_over_an_answer_that_comes(tabs: tuple[Tab, Tab]) -> None:
    one, two = tabs
    with one:
        one.ask_for_long_answers()
        one.send("Hello!", wait=False)
    with two:
        two.until(lambda: two.all('button[aria-label="Delete “Hello!”"]'))
        two.click("Delete “Hello!”")
    with one:
        one.until(lambda: one.texts(".conversations .title") == ["New conversation"])
        one.until_nothing_runs()
        assert one.kept() == []
        one.driver.refresh()
        one.until(lambda: one.texts(".conversations .title") == ["New conversation"])


def test_two_that_ask_at_the_same_moment_lose_nothing(tabs: tuple[Tab, Tab]) -> None:
    one, two = tabs
    with one:
        one.send("Hello! My name is Ada.")
    with two:
        two.open_conversation("Hello!")
        two.answer()
        two.ask_for_long_answers()
        two.driver.execute_script(DEAF)
    with one:
        one.ask_for_long_answers()
        one.send("What is 17 plus 25?", wait=False)
    with two:
        two.send("What is my name?", wait=False)
        two.driver.execute_script(HEARING)
        two.until(lambda: "(2)" in two.text(".conversations"))
        assert said(two) == ["Hello! My name is Ada.", "What is my name?"]
        two.click("Stop")
        two.until(lambda: two.all(".message.assistant.stopped"))
    with one:
        assert said(one) == ["Hello! My name is Ada.", "What is 17 plus 25?"]
        one.click("Stop")
        one.until(lambda: one.all(".message.assistant.stopped"))
        asked = {
            tuple(message["content"] for message in record["messages"][::2])
            for record in one.kept()
        }
    assert asked == {
        ("Hello! My name is Ada.", "What is 17 plus 25?"),
        ("Hello! My name is Ada.", "What is my name?"),
    }


@pytest.mark.parametrize("heard_ago_ms", [4_500, 60_000])
def test_an_answer_of_a_tab_that_is_gone_is_a_stopped_one(
    page: ChatPage, heard_ago_ms: int
) -> None:
    record = {
        "id": "x",
        "title": "Hello!",
        "parentId": None,
        "system": "",
        "createdAt": 1,
        "version": 3,
        "messages": [
            {"role": "user", "content": "Hello!"},
            {"role": "assistant", "content": "Goo", "state": "streaming"},
        ],
    }
    page.driver.execute_script(
        """const at = Date.now() - arguments[1];
        const record = {...arguments[0], answering: {tab: "gone", since: at, at}};
        localStorage.setItem("flexinfer.chat.x", JSON.stringify(record));
        sessionStorage.clear();""",
        record,
        heard_ago_ms,
    )
    page.driver.refresh()
    page.until(lambda: page.all(".message.assistant.stopped"))
    assert page.texts(".message.assistant .body") == ["Goo"]
    assert page.send("Hello! My name is Ada.")


def test_settings_hold_in_all_tabs(tabs: tuple[Tab, Tab]) -> None:
    one, two = tabs
    with two:
        two.find(".open-settings").click()
        two.find('#set-theme option[value="dark"]').click()
        two.find(".settings .primary").click()
    with one:
        one.until(lambda: one.find("html").get_attribute("data-theme") == "dark")
