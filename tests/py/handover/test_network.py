"""Prefill there, decode here, between machines: over TCP, with a key, in planes by gloo."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")

from flexinfer import LLM
from flexinfer.async_llm import AsyncLLM
from flexinfer.errors import HandoverError
from flexinfer.handover.network import NetworkChannel, invited, inviting, meeting_of
from flexinfer.server.handover.endpoints import NetworkEndpoint
from flexinfer.server.handover.partner import PrefillPartner
from helpers.free_port import free_port
from helpers.handover_servers import (
    TIMEOUT_S,
    complete,
    expected,
    metric,
    prompt_of,
    run_with,
)
from helpers.serving import serving, settings
from helpers.waiting import until

pytestmark = pytest.mark.usefixtures("patience")

KEY = "known at both ends"


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{free_port()}"


@contextmanager
def prefilling(llm: AsyncLLM, address: str) -> Iterator[str]:
    given = {"handover_address": address, "handover_key": KEY}
    with serving(llm, settings(role="prefill", **given)) as url:
        yield url


def test_a_prompt_is_prefilled_there_and_decoded_here(
    single: LLM, prefiller: AsyncLLM, decoder: AsyncLLM, address: str
) -> None:
    prompt = prompt_of(301)
    given = {"handover_address": address, "handover_key": KEY}
    with (
        prefilling(prefiller, address) as there,
        serving(decoder, settings(role="decode", **given)) as here,
    ):
        for salt in ("", "tenant"):
            answer = complete(here, prompt, **({"cache_salt": salt} if salt else {})).json()
            assert answer["choices"][0]["token_ids"] == expected(single, prompt)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) - 1
        assert metric(here, "parcels", "adopted") == 2
        until(lambda: metric(there, "parcels", "sent") == 2, "the count of what was sent")
        assert metric(there, "bytes", "sent") == metric(here, "bytes", "adopted") > 0
        assert metric(here, "tokens") == 2 * (len(prompt) - 1)
        assert [metric(here, "failures", r) for r in ("refused", "slow", "lost")] == [0, 0, 0]


def test_who_does_not_know_the_key_is_refused_and_the_prompt_computed_here(
    single: LLM, prefiller: AsyncLLM, decoder: AsyncLLM, address: str
) -> None:
    prompt = prompt_of(302)
    stranger = NetworkEndpoint.of(address, "something else that is long")
    with prefilling(prefiller, address) as there:
        with pytest.raises(HandoverError, match="does not have the same handover_key"):
            stranger.connect(TIMEOUT_S)
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n" + b" " * 40)
            connection.settimeout(TIMEOUT_S)
            with suppress(ConnectionResetError):
                while connection.recv(1 << 10):
                    pass  # its nonce; then it hangs up
        partner = PrefillPartner(decoder, stranger, TIMEOUT_S, 64)
        assert run_with(partner, decoder, prompt) == [expected(single, prompt)]
        assert partner.stats.failures == {"unreachable": 1}
        known = PrefillPartner(decoder, NetworkEndpoint.of(address, KEY), TIMEOUT_S, 64)
        other = prompt_of(303)
        assert run_with(known, decoder, other) == [expected(single, other)]
        until(lambda: metric(there, "parcels", "sent") == 1, "the count of what was sent")


DEATHS = ["before an answer", "before the group", "within the planes"]


@pytest.mark.parametrize("dies", DEATHS)
def test_a_partner_that_dies_means_that_the_prompt_is_computed_here(
    dies: str, single: LLM, decoder: AsyncLLM, address: str
) -> None:
    endpoint = NetworkEndpoint.of(address, KEY)
    prompt, other = prompt_of(304 + DEATHS.index(dies)), prompt_of(314 + DEATHS.index(dies))
    listener = endpoint.listen()
    listener.settimeout(TIMEOUT_S)

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            channel = NetworkChannel(connection, TIMEOUT_S, KEY, listens=True)
            ask, _ = channel.receive()
            if dies != "before an answer":
                channel.send({"accepted": True})
            if dies == "within the planes":
                header = {name: ask[name] for name in ("model", "tokenizer", "salt")}
                header |= {"planes": ask["layout"], "tokens": ask["prefill"]}
                with inviting(channel) as peer:
                    peer.send_text(json.dumps(header))
                    assert peer.receive_text() == '"go"'

    thread = threading.Thread(target=answer)
    thread.start()
    partner = PrefillPartner(decoder, endpoint, TIMEOUT_S, 64)
    assert run_with(partner, decoder, prompt) == [expected(single, prompt)]
    thread.join()
    listener.close()
    assert partner.stats.failures == {"lost": 1}
    assert asyncio.run(decoder.call(lambda engine: engine.manager.stats().num_vtensors)) == 0
    partner = PrefillPartner(decoder, endpoint, TIMEOUT_S, 64)
    assert run_with(partner, decoder, other) == [expected(single, other)]
    assert partner.stats.failures == {"unreachable": 1}


def num_vtensors(llm: AsyncLLM) -> int:
    return asyncio.run(llm.call(lambda engine: engine.manager.stats().num_vtensors))


LEAVES = ["before the group", "to another group", "before it says go", "within the planes"]


@pytest.mark.parametrize("goes", LEAVES)
def test_a_decoding_server_that_goes_leaves_nothing_behind(
    goes: str, prefiller: AsyncLLM, address: str
) -> None:
    endpoint = NetworkEndpoint.of(address, KEY)
    handover = asyncio.run(prefiller.call(lambda engine: engine.handover))
    ask = {
        "prefill": prompt_of(330),
        "salt": goes,
        "model": handover.identity.model,
        "tokenizer": handover.identity.tokenizer,
        "layout": endpoint.layout(handover),
    }
    with prefilling(prefiller, address) as there:
        with endpoint.connect(TIMEOUT_S) as channel:
            channel.send(ask)
            assert channel.receive()[0]["accepted"]
            meeting = meeting_of(channel.receive()[0])
            assert num_vtensors(prefiller) == 1
            if goes == "to another group":
                channel.send({"at": "another"})
                assert "does not speak this protocol" in channel.receive()[0]["refused"]
            elif goes != "before the group":
                with invited(channel, meeting) as peer:
                    assert json.loads(peer.receive_text())["tokens"] == ask["prefill"]
                    if goes == "within the planes":
                        peer.send_text(json.dumps("go"))
                del peer
        gc.collect()
        until(lambda: num_vtensors(prefiller) == 0, "the end of what nobody takes")
        pins = asyncio.run(prefiller.call(lambda engine: len(engine.scheduler.pins)))
        assert pins == 0
        if goes != "within the planes":  # they fit the sockets' buffers
            assert metric(there, "parcels", "sent") == 0
