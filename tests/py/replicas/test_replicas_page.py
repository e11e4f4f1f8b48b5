"""The page in a real browser, before two replicas on a real cluster."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("selenium")
pytest.importorskip("ray", reason="replicas need Ray: make test-replicas installs it")

from selenium.webdriver.support.ui import Select

from helpers.browser import axe_problems, fresh_page, take_picture
from helpers.chat_page import ChatPage
from helpers.replica_servers import numbers, processes
from helpers.waiting import until

if TYPE_CHECKING:
    from selenium import webdriver

pytestmark = [pytest.mark.slow, pytest.mark.browser]

QUESTION = "Hello! My name is Ada."


@pytest.fixture
def page(
    driver: webdriver.Chrome, served: str, request: pytest.FixtureRequest
) -> Iterator[ChatPage]:
    until(lambda: len(processes(served)) == 2, "two replicas")
    with fresh_page(driver, served, request.node.name) as chat:
        yield chat


def choice(page: ChatPage) -> Select:
    return Select(page.find(".replica select"))


def shown(page: ChatPage) -> str:
    """Whose memory is seen."""
    return page.driver.execute_script(
        "return document.querySelector('.replica select option').textContent"
    ).removeprefix("auto: ")


def test_the_map_follows_the_chat_and_can_be_chosen(page: ChatPage, served: str) -> None:
    page.until(lambda: page.find(".replica").is_displayed())
    names = sorted(processes(served))
    assert [option.text for option in choice(page).options][1:] == names
    before = numbers(served, "flexinfer:generation_tokens_total")
    page.send(QUESTION)
    after = numbers(served, "flexinfer:generation_tokens_total")
    (answering,) = [name for name in names if after[name] > before[name]]
    page.until(lambda: shown(page) == answering)
    page.until(lambda: QUESTION in page.texts("#memory .row b"))
    (other,) = {*names} - {answering}
    choice(page).select_by_value(other)
    page.until(lambda: shown(page) == other)
    page.until(lambda: QUESTION not in page.texts("#memory .row b"))
    page.send("And yours?")
    assert shown(page) == other, "what was chosen stays"
    take_picture(page.driver, "replica_chosen")
    choice(page).select_by_value("")
    page.until(lambda: shown(page) == answering)
    page.until(lambda: QUESTION in page.texts("#memory .row b"))
    for dark in (False, True):
        page.emulate(dark=dark)
        assert axe_problems(page.driver) == []


def test_one_that_hangs_or_has_gone_is_told_of(page: ChatPage, served: str) -> None:
    page.until(lambda: page.find(".replica").is_displayed())
    name, pid = max(processes(served).items())
    choice(page).select_by_value(name)
    page.until(lambda: shown(page) == name)
    os.kill(pid, signal.SIGSTOP)
    page.until(lambda: f"the replica {name} has not answered" in page.text("#memory .notice"))
    take_picture(page.driver, "replica_silent")
    os.kill(pid, signal.SIGKILL)
    page.until(lambda: shown(page) != name)
    page.until(lambda: not page.find("#memory .notice").is_displayed())
    page.send(QUESTION)
    page.console()  # the browser's own lines on answers that were errors
