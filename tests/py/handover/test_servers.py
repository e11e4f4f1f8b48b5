"""Prefill here, decode there, over a Unix socket: whatever the partner does, the client gets what
one server would have said."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")

import httpx

from flexinfer import LLM
from flexinfer.async_llm import AsyncLLM
from flexinfer.handover.channel import Channel
from flexinfer.server.app import create_app
from flexinfer.server.handover import partner as partner_module
from flexinfer.server.handover.endpoints import LocalEndpoint
from flexinfer.server.handover.partner import PrefillPartner
from flexinfer.server.handover.prefiller import PREFILL
from flexinfer.server.handover.socket_path import listen
from helpers.handover_servers import TIMEOUT_S, complete, expected, metric, prompt_of, run_with
from helpers.serving import serving, settings
from helpers.waiting import until

pytestmark = pytest.mark.usefixtures("patience")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv.sock"


@contextmanager
def prefilling(llm: AsyncLLM, path: Path) -> Iterator[str]:
    with serving(llm, settings(role="prefill", handover_socket=path)) as url:
        yield url


@contextmanager
def decoding(llm: AsyncLLM, path: Path, **changed: Any) -> Iterator[str]:
    with serving(llm, settings(role="decode", handover_socket=path, **changed)) as url:
        yield url


def test_a_prompt_is_prefilled_there_and_decoded_here(
    single: LLM, prefiller: AsyncLLM, decoder: AsyncLLM, path: Path
) -> None:
    prompt = prompt_of(1)
    with prefilling(prefiller, path) as there, decoding(decoder, path) as here:
        refused = complete(there, prompt)
        answer = complete(here, prompt).json()
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "wrong_role")
        assert answer["choices"][0]["token_ids"] == expected(single, prompt)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) - 1
        assert metric(here, "parcels", "adopted") == 1
        until(lambda: metric(there, "parcels", "sent") == 1, "the count of what was sent")
        assert metric(there, "bytes", "sent") == metric(here, "bytes", "adopted") > 0
        assert metric(there, "chunks_copied") == 0
        assert metric(here, "tokens") == len(prompt) - 1
        # Cached, or short: nobody is asked.
        complete(here, [*prompt, 5, 6, 7])
        complete(here, prompt_of(2, 10))
        assert metric(there, "parcels", "sent") == 1
        # Streams, samples and tenants go the same way.
        other = prompt_of(3)
        with httpx.stream(
            "POST",
            f"{here}/v1/completions",
            json={"prompt": other, "temperature": 0, "max_tokens": 8, "stream": True, "n": 2,
                  "cache_salt": "tenant", "return_token_ids": True},
            timeout=60,
        ) as stream:  # fmt: skip
            events = [json.loads(x[6:]) for x in stream.iter_lines() if x.startswith("data: {")]
        choices = [choice for event in events for choice in event["choices"]]
        first = [t for c in choices if c["index"] == 0 for t in c.get("token_ids") or ()]
        assert first == expected(single, other)
        assert metric(here, "parcels", "adopted") == 2
        assert [metric(here, "failures", r) for r in ("refused", "slow", "lost")] == [0, 0, 0]
    assert not path.exists()


def hang(channel: Channel, ended: threading.Event) -> None:
    ended.wait(TIMEOUT_S)


def accept_and_hang(channel: Channel, ended: threading.Event) -> None:
    channel.receive()
    channel.send({"accepted": True})
    ended.wait(TIMEOUT_S)


def be_full(channel: Channel, ended: threading.Event) -> None:
    channel.receive()
    channel.send({"refused": "8 prompts are being prefilled already"})


def die(channel: Channel, ended: threading.Event) -> None:
    channel.receive()
    channel.send({"accepted": True})


def die_within_the_parcel(channel: Channel, ended: threading.Event) -> None:
    die(channel, ended)
    channel._socket.sendall(b"FXHAND2\n\0\0\1\0")


def be_another_program(channel: Channel, ended: threading.Event) -> None:
    channel._socket.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def send_nonsense(channel: Channel, ended: threading.Event) -> None:
    die(channel, ended)
    channel.send({"parcels": [{"num_files": 0, "layout": 1}], "tokens": [1], "salt": ""})


@contextmanager
def fake_partner(
    path: Path, behave: Callable[[Channel, threading.Event], None]
) -> Iterator[list[int]]:
    """Something that listens there. Yields one entry per connection."""
    asked: list[int] = []
    ended = threading.Event()
    listener = listen(path)
    listener.settimeout(TIMEOUT_S)

    def serve() -> None:
        while not ended.is_set():
            connection, _ = listener.accept()
            if ended.is_set():
                connection.close()
                return
            asked.append(len(asked))
            with Channel(connection, TIMEOUT_S) as channel:
                behave(channel, ended)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield asked
    finally:
        ended.set()
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(str(path))
        thread.join()
        listener.close()


PARTNERS = [
    (accept_and_hang, "slow"),
    (hang, "slow"),
    (be_full, "refused"),
    (die, "lost"),
    (die_within_the_parcel, "lost"),
    (be_another_program, "lost"),
    (send_nonsense, "lost"),
]


@pytest.mark.parametrize(("behave", "reason"), PARTNERS)
def test_whatever_the_partner_does_the_prompt_is_computed_here(
    behave: Callable[[Channel, threading.Event], None],
    reason: str,
    single: LLM,
    decoder: AsyncLLM,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_slow = reason == "slow"
    if is_slow:
        monkeypatch.setattr(partner_module, "ACCEPT_TIMEOUT_S", 0.1)
    number = 100 + 2 * [one for one, _ in PARTNERS].index(behave)
    prompts = [prompt_of(number), prompt_of(number + 1)]
    partner = PrefillPartner(decoder, LocalEndpoint(path), 0.2 if is_slow else TIMEOUT_S, 64)
    partner._backoff_s = partner_module.MAX_BACKOFF_S  # it is not asked again while this test runs
    with fake_partner(path, behave) as asked:
        found = run_with(partner, decoder, *prompts)
    assert found == [expected(single, prompt) for prompt in prompts]
    if is_slow:
        assert partner.stats.failures == {"slow": 1, "avoided": 1}
        assert len(asked) == 1
    else:
        assert partner.stats.failures == {reason: 2}


def test_a_partner_that_is_not_there_costs_nothing(
    single: LLM, decoder: AsyncLLM, path: Path
) -> None:
    prompt = prompt_of(50)
    partner = PrefillPartner(decoder, LocalEndpoint(path), TIMEOUT_S, 64)
    assert run_with(partner, decoder, prompt) == [expected(single, prompt)]
    assert partner.stats.failures == {"unreachable": 1}


def test_memory_that_is_short_here_means_that_the_parcel_goes_back(
    single: LLM,
    prefiller: AsyncLLM,
    decoder: AsyncLLM,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from flexinfer.scheduler.admission import Admission

    prompt = prompt_of(60)
    partner = PrefillPartner(decoder, LocalEndpoint(path), TIMEOUT_S, 64)
    with prefilling(prefiller, path), monkeypatch.context() as patch:
        patch.setattr(Admission, "has_room", lambda *_: False)
        ask = asyncio.run(partner._have_prefilled({"prompt_token_ids": prompt}, "r"))
        assert (ask, partner.stats.failures) == (False, {"no room": 1})
    assert run_with(partner, decoder, prompt) == [expected(single, prompt)]


def question(llm: AsyncLLM, **changed: Any) -> dict[str, Any]:
    handover = asyncio.run(llm.call(lambda engine: engine.handover))
    identity = handover.identity
    return {
        "prefill": prompt_of(70),
        "salt": "",
        "model": identity.model,
        "tokenizer": identity.tokenizer,
        "layout": handover.layout,
        **changed,
    }


def test_a_wrong_question_is_refused_by_name(prefiller: AsyncLLM, path: Path) -> None:
    with prefilling(prefiller, path):
        for wrong, why in (
            ({"model": "another"}, "the parcel's model is 'another'"),
            ({"tokenizer": "another"}, "the parcel's tokenizer is 'another'"),
            ({"layout": "another"}, "heads, dtype, layers per plane or chunk_bytes differ"),
            ({"prefill": "text"}, "asks for no prefill"),
            ({"prefill": [1 << 40]}, "is not in"),
            ({"prefill": []}, "the prompt is empty"),
        ):
            with Channel.connect(str(path), TIMEOUT_S) as channel:
                channel.send(question(prefiller, **wrong))
                answer, _ = channel.receive()
                if "accepted" in answer:  # tokens are looked at when it is queued
                    answer, _ = channel.receive()
                assert why in answer["refused"]


def test_a_partner_that_sleeps_says_so(prefiller: AsyncLLM, path: Path) -> None:
    with prefilling(prefiller, path):
        asyncio.run(prefiller.sleep())
        with Channel.connect(str(path), TIMEOUT_S) as channel:
            channel.send(question(prefiller))
            assert "it sleeps" in channel.receive()[0]["refused"]
        asyncio.run(prefiller.wake_up())


def test_only_so_many_are_taken_and_who_asks_and_goes_ends_its_prefill(
    prefiller: AsyncLLM, path: Path
) -> None:
    is_held, goes_on = threading.Event(), threading.Event()

    def hold(engine: Any) -> int:
        is_held.set()
        goes_on.wait(TIMEOUT_S)
        return int(engine.step_totals.num_tokens)

    def look(engine: Any) -> tuple[int, bool, int]:
        tokens = engine.step_totals.num_tokens
        return tokens, engine.has_unfinished_requests(), len(engine.scheduler.pins)

    asked = question(prefiller, prefill=prompt_of(81))
    with prefilling(prefiller, path):
        with ThreadPoolExecutor(1) as threads:
            held = threads.submit(lambda: asyncio.run(prefiller.call(hold)))
            is_held.wait(TIMEOUT_S)
            with Channel.connect(str(path), TIMEOUT_S) as channel:
                channel.send(asked)
                assert channel.receive()[0]["accepted"]
                others = [Channel.connect(str(path), TIMEOUT_S) for _ in range(8)]
                for number, other in enumerate(others):
                    other.send(asked)
                    word = "refused" if number == 7 else "accepted"
                    assert word in other.receive()[0], number
                for other in others:
                    other.close()
            # Each of the 8 is queued, dropped and let go.
            until(lambda: prefiller._thread._commands.qsize() >= 3 * 8, "24 commands")
            goes_on.set()
            num_tokens = held.result()
        assert asyncio.run(prefiller.call(look)) == (num_tokens, False, 0)


def test_an_engine_of_another_role_than_its_server_is_refused(decoder: AsyncLLM) -> None:
    with pytest.raises(ValueError, match="the engine's role is 'decode', the server's 'both'"):
        create_app(decoder, settings())


def test_a_partner_that_sends_another_prompt_is_not_believed(
    single: LLM, prefiller: AsyncLLM, decoder: AsyncLLM, path: Path
) -> None:
    prompt, other = prompt_of(90), prompt_of(91)

    async def computed() -> Any:
        async for _ in prefiller.generate(other, PREFILL, "other"):
            pass
        handover = await prefiller.call(lambda engine: engine.handover)
        return await prefiller.call(lambda engine: handover.export(other))

    delivery = asyncio.run(computed())

    def send_another(channel: Channel, ended: threading.Event) -> None:
        die(channel, ended)
        delivery.send(channel)

    partner = PrefillPartner(decoder, LocalEndpoint(path), TIMEOUT_S, 64)
    with fake_partner(path, send_another):
        assert run_with(partner, decoder, prompt) == [expected(single, prompt)]
    assert partner.stats.failures == {"lost": 1}
    delivery.close()
