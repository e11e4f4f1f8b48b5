"""The memory map: what is seen first, what rows are called, how they stand, and what marks mean."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

pytest.importorskip("selenium")

from selenium.webdriver import ActionChains, Keys

from helpers.chat_page import ChatPage
from helpers.serving import ServerProcess

pytestmark = pytest.mark.browser

ROW_TOKENS = 10

MAP = """
const [changed] = arguments;
const real = window.realFetch ??= window.fetch;
window.shown = {...window.shown, ...changed};
let etag = window.etag = (window.etag ?? 0) + 1;
window.fetch = async (path, options = {}) => {
  if (!path.startsWith("admin/memory")) return real(path, options);
  const map = await (await real(path, {...options, headers: {}})).json();
  const engine = {...map.engine, num_waiting: etag};
  return new Response(JSON.stringify({...map, ...window.shown, engine}),
    {headers: {ETag: `"${etag}"`}});
};
document.dispatchEvent(new Event("visibilitychange")); // look at once
return etag;
"""
"""Instead of the server's map, one with these vTensors, prefixes and chunks; it is to be known by
the number of waiting requests."""


def live(number: int, chunks: list[int], cached: int = 0) -> dict[str, Any]:
    return {
        "id": number,
        "slot": number,
        "state": "live",
        "request_id": f"chatcmpl-{number:032x}",
        "num_tokens": ROW_TOKENS * len(chunks),
        "num_cached_tokens": cached,
        "mapped_tokens": ROW_TOKENS * len(chunks),
        "mapped_bytes": 1,
        "chunks_aliased": 0,
        "chunks_copied": 0,
        "chunks": chunks,
    }


def node(chunks: list[int], text: str, parent: int = -1, start: int = 0) -> dict[str, Any]:
    return {
        "parent": parent,
        "start_tokens": start,
        "num_tokens": ROW_TOKENS * len(chunks),
        "last_used": 1,
        "chunks": chunks,
        "text": text,
        "tenant": "",
        "pinned_by": [],
    }


def chunk(number: int, generation: int = 0) -> dict[str, Any]:
    return {"id": number, "generation": generation, "refs": 1, "recorded": True, "sharers": []}


def show(
    page: ChatPage, *vtensors: Any, prefixes: Any = (), chunks: Any = (), **fields: Any
) -> None:
    shown = {"row_tokens": ROW_TOKENS, "num_planes": 1, "chunk_bytes": 4096, **fields}
    number = page.driver.execute_script(
        MAP,
        {**shown, "vtensors": vtensors, "prefixes": list(prefixes), "chunks": list(chunks)},
    )
    page.until(lambda: page.text(".activity").endswith(f" {number} waiting"))


def labels(page: ChatPage) -> list[str]:
    return [row["label"] for row in page.rows()]


def top(page: ChatPage, selector: str) -> float:
    found: float = page.driver.execute_script(
        f"return document.querySelector('{selector}').getBoundingClientRect().top"
    )
    return found


@pytest.mark.parametrize(
    ("width", "height", "phone"), [(1440, 900, False), (390, 844, True)], ids=["wide", "phone"]
)
def test_the_first_row_stands_in_the_upper_third(
    page: ChatPage, width: int, height: int, phone: bool
) -> None:
    page.resize(width, height, phone=phone)
    if phone:
        page.find('#tabs [data-view="memory"]').click()
    show(page, live(1, [1, 2, 3]))
    assert top(page, "button.chunk") < 0.3 * height


def test_figures_stand_on_one_line_on_a_phone(page: ChatPage) -> None:
    page.resize(390, 844, phone=True)
    page.find('#tabs [data-view="memory"]').click()
    page.until(lambda: page.text(".figures dd") != "–")
    tops = page.driver.execute_script(
        """const figures = [...document.querySelector(".figures").children];
        for (const figure of figures) figure.querySelector("dd").textContent = "1023.9 MiB";
        return figures.map(figure => figure.getBoundingClientRect().top);"""
    )
    assert len(tops) == 3
    assert len(set(tops)) == 1


def test_rows_of_others_have_names_that_can_be_read(page: ChatPage, server: ServerProcess) -> None:
    body = {"prompt": "Dragons are large animals that", "max_tokens": 1}
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()
    page.until(lambda: "Dragons are large animals that" in labels(page))
    show(page, live(7, [1]), prefixes=[node([2], "")])
    assert labels(page) == ["Request 7", "Prefix 1"]


def test_what_goes_on_from_the_same_start_stands_as_a_tree(page: ChatPage) -> None:
    prefixes = [
        node([1, 2], "Once upon a time "),
        node([3, 4, 5], "there was a king", parent=0, start=20),
        node([6], "there was a queen", parent=0, start=20),
        node([7, 8, 9], "Something else"),
        node([7], "Some", parent=-1),
    ]
    show(page, prefixes=prefixes)
    assert labels(page) == [
        "Once upon a time there was a king",
        "… there was a queen",
        "Something else",
        "Some",
    ]
    branches = page.texts(".row.branch:not(.leaving) b")
    assert branches == ["… there was a queen"]
    hues = [dict(row["chunks"]) for row in page.rows()[:2]]
    assert hues[0]["1"] == hues[1]["1"] != "null", "the common start is seen in both"


def test_rows_under_one_system_prompt_are_called_after_where_they_part(page: ChatPage) -> None:
    """It is shorter than a square, so that they stand in no tree."""
    system = node([1], "You are a helpful assistant. ") | {"num_tokens": 5}
    rest = [
        node([2, 3, 4], "Who was Ada?", parent=0, start=5),
        node([5, 6], "What is 17 plus 25?", parent=0, start=5),
        node([7], "Something else"),
    ]
    show(page, prefixes=[system, *rest])
    assert labels(page) == ["… Who was Ada?", "… What is 17 plus 25?", "Something else"]


def test_fifty_prefixes_fold_the_small_ones(page: ChatPage) -> None:
    prefixes = [node(list(range(100 * i, 100 * i + i)), f"Prefix {i}") for i in range(1, 51)]
    show(page, live(1, list(range(9000, 9100))), prefixes=prefixes)
    assert labels(page)[1:] == [f"Prefix {i}" for i in range(50, 42, -1)]
    fold = page.find(".kind[data-kind=cached] .fold")
    assert fold.text == "42 more, 9,030 tokens"
    fold.click()
    assert len(page.rows()) == 51
    fold.click()
    assert len(page.rows()) == 9
    assert fold.get_attribute("aria-expanded") == "false"


def test_a_new_square_keeps_its_colour_and_gets_a_ring(page: ChatPage) -> None:
    page.driver.execute_script("performance.now = () => 0")  # the ring stays
    show(page, live(1, [1, 2, 3]), chunks=[chunk(i) for i in range(1, 4)])
    show(
        page,
        live(1, [1, 2, 3]),
        live(2, [1, 2, 9], cached=20),
        live(3, [1, 2, 9], cached=20),
        chunks=[chunk(i) for i in (1, 2, 3, 9)],
    )
    new, old = page.driver.execute_script(
        """return [".new", ":not(.new)"].map(selector => {
          const square = document.querySelector(`.cells .shared${selector}`);
          const {backgroundColor, boxShadow} = getComputedStyle(square);
          return [backgroundColor.startsWith("oklch"), boxShadow !== "none"];
        });"""
    )
    assert (new, old) == ([True, True], [True, False])


def test_a_chunk_under_the_pointer_stays_marked_when_rows_are_drawn_anew(
    page: ChatPage,
) -> None:
    page.driver.execute_script("let now = 0; performance.now = () => (now += 10_000)")  # no rings
    ActionChains(page.driver).move_to_element(page.find(".model")).perform()
    show(page, live(1, [1, 2]), live(2, [1, 3]))
    page.driver.execute_script(
        """document.querySelector('button[data-id="1"]').dispatchEvent(
          new PointerEvent("pointerover", {bubbles: true}));"""
    )
    show(page, live(1, [1, 2]), live(2, [1, 3, 4]))
    assert [twin.get_attribute("data-id") for twin in page.all(".twin")] == ["1", "1"]


def test_maps_are_looked_at_one_after_the_other(page: ChatPage) -> None:
    """Or an older one could be drawn over a newer one."""
    page.driver.execute_script(
        """const real = window.fetch;
        window.running = window.most = window.looks = 0;
        window.fetch = async (path, options) => {
          if (!path.startsWith("admin/memory")) return real(path, options);
          window.most = Math.max(window.most, window.running += 1);
          const answer = await real(path, options);
          window.running -= 1;
          window.looks += 1;
          return answer;
        };
        for (let i = 0; i < 3; i += 1) document.dispatchEvent(new Event("visibilitychange"));"""
    )
    page.until(lambda: page.driver.execute_script("return window.looks") >= 2)
    assert page.driver.execute_script("return window.most") == 1


def test_a_chunk_that_is_used_again_is_seen_to_have_been_evicted(page: ChatPage) -> None:
    """Between two looks its prefix went, and another request took it."""
    show(page, prefixes=[node([1, 2], "Gone")], chunks=[chunk(1), chunk(2)])
    assert labels(page) == ["Gone"]
    page.until(lambda: not page.all(".cells .evicted"))
    page.driver.execute_script(
        """window.gone = 0;
        new MutationObserver(() => {
          window.gone = Math.max(window.gone, document.querySelectorAll(".cells .evicted").length);
        }).observe(document.querySelector(".grid"), {childList: true, subtree: true});"""
    )
    again = [chunk(1, generation=1), chunk(2, generation=1)]
    show(page, prefixes=[node([2, 1], "Come")], chunks=again)
    assert page.driver.execute_script("return window.gone") == 2


def test_a_reserved_square_never_stands_on_a_line_of_its_own(page: ChatPage) -> None:
    for squares in range(22, 32):
        show(page, live(1, list(range(squares))))
        last, ghosts = page.driver.execute_script(
            """const box = document.querySelector(".ghosts");
            return [[...document.querySelectorAll("button.chunk")].at(-1).offsetTop,
              [...box.children].map(one => one.offsetTop).filter(
                top => top < box.offsetTop + box.offsetHeight)];"""
        )
        assert set(ghosts) <= {last}


def test_rows_that_a_window_has_left_are_seen_as_given_back(page: ChatPage) -> None:
    """They are no chunks: no button, no holder; what is left has its place under its tokens."""
    groups = [{"window": None, "num_layers": 1, "row_bytes": 4096}]
    groups.append({"window": 20, "num_layers": 5, "row_bytes": 20480})
    full, near = [1, 2, 3, 4, 5], [None, None, None, 8, 9]
    show(page, live(1, full) | {"groups": [full, [6, 7, 8, 9, 10]]}, groups=groups)
    show(page, live(1, full) | {"groups": [full, near]}, groups=groups)
    assert labels(page) == ["Request 1", "Window of 20 tokens"]
    assert [chunk for chunk, _ in page.rows()[1]["chunks"]] == ["8", "9"]
    assert page.text(".row.lane small") == "2 squares, 3 given back"
    lefts = page.driver.execute_script(
        """return [...document.querySelectorAll(".row.live .cells")].map(cells =>
          [...cells.querySelectorAll("button, i.given-back")].map(
            one => [one.localName, one.offsetLeft]))"""
    )
    assert [place for _, place in lefts[0]] == [place for _, place in lefts[1]]
    assert [name for name, _ in lefts[1]] == ["i", "i", "i", "button", "button"]
    assert page.text(".kind[data-kind=live] .count") == "1"
    page.click_on('.lane button[data-id="9"]')
    assert "20.0 KiB of physical memory in 5 planes, tokens 40 to 49" in page.text(".detail")


def test_a_model_whose_layers_all_have_windows_has_one_row(page: ChatPage) -> None:
    groups = [{"window": 200, "num_layers": 4, "row_bytes": 4096}]
    kept = list(range(1, 21))
    show(page, live(1, kept) | {"groups": [[None] * 30 + kept]}, groups=groups)
    assert labels(page) == ["Request 1"]
    assert page.text(".row.live small") == "200 tokens, 30 squares given back"
    assert len(page.all(".cells .given-back")) == 30


def test_a_recurrent_state_has_a_row_of_its_own(page: ChatPage) -> None:
    """Beside the request that it is of, and recorded as a snapshot that both hold."""
    whose = {"request_id": None, "state_of": live(1, [])["request_id"]}
    shared = chunk(4) | {"refs": 2, "sharers": [2]}
    snapshot = node([4, 5], "(recurrent state)")
    state = live(2, [3, 4]) | whose
    show(page, live(1, [1, 2]), state, prefixes=[snapshot], chunks=[shared])
    assert labels(page) == ["Request 1", "State 2", "(recurrent state)"]
    assert page.text(".kind[data-kind=live] .count") == "2"
    page.find('.live button[data-id="4"]').click()
    detail = page.text(".detail")
    assert "State 2" in detail
    assert "(recurrent state)" in detail


def test_nothing_moves_while_an_answer_comes(page: ChatPage) -> None:
    page.send("Hello! My name is Ada.")
    page.until_nothing_runs()
    page.driver.execute_script(
        """window.shift = 0;
        new PerformanceObserver(list => list.getEntries().forEach(entry => {
          window.shift += entry.value;
        })).observe({type: "layout-shift"});"""
    )
    page.send("What is 17 plus 25?")
    page.until_nothing_runs()
    assert page.driver.execute_script("return window.shift") < 0.1


def test_settings_fit_the_screen_and_stand_once(page: ChatPage) -> None:
    assert len(page.all(".open-settings")) == 1
    assert not page.all('#chat button[aria-label^="Settings"]')
    page.find(".open-settings").click()
    save = page.find(".settings .primary").rect
    assert save["y"] + save["height"] < 900
    page.resize(390, 500, phone=True)
    save = page.find(".settings .primary").rect
    assert save["y"] + save["height"] < 500


def test_a_conversation_is_renamed_and_found(page: ChatPage) -> None:
    page.send("Hello! My name is Ada.")
    page.find(".new").click()
    page.send("What is 17 plus 25?")
    page.click("Rename “Hello! My name is Ada.”")
    field = page.driver.switch_to.active_element
    field.send_keys("Introduction", Keys.ENTER)
    assert page.texts(".conversations .title") == ["What is 17 plus 25?", "Introduction"]
    ActionChains(page.driver).double_click(page.all(".conversations .open")[1]).perform()
    page.driver.switch_to.active_element.send_keys("Never mind", Keys.ESCAPE)
    search = page.find(".search input")
    search.send_keys("ada")
    assert page.texts(".conversations .title") == ["Introduction"], "what was said is found, too"
    search.send_keys("xyz")
    assert page.texts(".conversations .title") == []
    assert "No conversation" in page.text(".nothing")
    search.send_keys(Keys.ESCAPE)
    assert len(page.all(".conversations li")) == 2
    page.driver.refresh()
    page.until(lambda: len(page.all(".conversations li")) == 2)
    assert "Introduction" in page.texts(".conversations .title")
