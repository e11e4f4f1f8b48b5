"""LoRA adapters over HTTP: chosen by `model`, loaded and unloaded while serving, behind a key."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("fastapi")

import httpx

from flexinfer.async_llm import AsyncLLM
from flexinfer.server.app import create_app
from flexinfer.server.lora_module_path import LoRAModulePath
from flexinfer.server.settings import ServerSettings
from flexinfer.server.state import ServerState
from helpers.lora_kit import save_shipped_adapter
from helpers.serving import MODEL, make_llm

ADMIN = {"Authorization": "Bearer admin"}
QUESTION = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_shipped_adapter(tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    made = make_llm(enable_lora=True)
    yield made
    made.shutdown()


def client_of(llm: AsyncLLM, *others: str) -> httpx.AsyncClient:
    """others: names of the model."""
    settings = ServerSettings(served_model_names=(MODEL, *others), admin_api_key="admin")
    transport = httpx.ASGITransport(app=create_app(llm, settings))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", timeout=60)


def state_of(client: httpx.AsyncClient) -> ServerState:
    transport = client._transport  # httpx has no other way to the app that it was given
    assert isinstance(transport, httpx.ASGITransport)
    state: ServerState = transport.app.state.flexinfer  # type: ignore[attr-defined]  # FastAPI's
    return state


async def load(
    client: httpx.AsyncClient, name: str, folder: Path, **more: object
) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(folder), **more}
    return await client.post("/v1/load_lora_adapter", json=body, headers=ADMIN)


async def replace(client: httpx.AsyncClient, name: str, folder: Path) -> httpx.Response:
    return await load(client, name, folder, load_inplace=True)


async def unload(client: httpx.AsyncClient, name: str) -> httpx.Response:
    return await client.post("/v1/unload_lora_adapter", json={"lora_name": name}, headers=ADMIN)


class Held:
    """An async method of `owner` that waits until `go` is set. `call` is the method itself."""

    def __init__(self, owner: Any, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = asyncio.Event(), asyncio.Event()
        self.call = getattr(owner, method)
        monkeypatch.setattr(owner, method, self._wait)

    async def _wait(self, *given: Any, **named: Any) -> Any:
        self.begun.set()
        await self.go.wait()
        return await self.call(*given, **named)


async def say(client: httpx.AsyncClient, model: str) -> list[str]:
    """What each endpoint answers."""
    common: dict[str, Any] = {"model": model, "temperature": 0}
    bodies = {
        "/v1/completions": {"prompt": "Hello", "max_tokens": 8},
        "/v1/chat/completions": {"messages": QUESTION, "max_tokens": 8},
        "/v1/responses": {"input": "Hello", "max_output_tokens": 16},
        "/v1/messages": {"messages": QUESTION, "max_tokens": 8},
    }
    answers = []
    for path, body in bodies.items():
        found = (await client.post(path, json=common | body)).raise_for_status().json()
        parts = found.get("choices") or found.get("content") or found.get("output") or []
        answers.append(str([{**part, "id": None} for part in parts]))
    return answers


def test_adapters_come_and_go_and_are_chosen_by_model(llm: AsyncLLM, folder: Path) -> None:
    async def visit() -> None:
        async with client_of(llm) as client:
            plain = await say(client, MODEL)
            assert (await load(client, "mine", folder)).text.startswith("Success: LoRA adapter")
            cards = (await client.get("/v1/models")).json()["data"]
            assert [(card["id"], card["parent"]) for card in cards] == [
                (MODEL, None),
                ("mine", MODEL),
            ]
            assert cards[1]["root"] == str(folder)
            adapted = await say(client, "mine")
            assert all(one != other for one, other in zip(adapted, plain, strict=True))
            assert await say(client, MODEL) == plain
            taken = await load(client, "mine", folder)
            assert (taken.status_code, taken.json()["error"]["param"]) == (400, "lora_name")
            assert (await unload(client, "mine")).status_code == 200
            assert (await unload(client, "mine")).status_code == 404
            gone = await client.post("/v1/completions", json={"model": "mine", "prompt": "Hello"})
            assert gone.status_code == 404
        assert await llm.list_loras() == set()

    asyncio.run(visit())


def test_a_conversation_keeps_the_kv_of_its_adapter(llm: AsyncLLM, folder: Path) -> None:
    async def visit() -> None:
        async with client_of(llm) as client:
            await load(client, "mine", folder)
            made = (await client.post("/v1/conversations", json={})).json()["id"]
            body = {"messages": QUESTION, "conversation": made, "max_tokens": 8}
            await client.post("/v1/chat/completions", json=body | {"model": "mine"})
            found = (await client.get(f"/v1/conversations/{made}")).json()
            assert found["pinned_tokens"] > 0
            await unload(client, "mine")

    asyncio.run(visit())


def test_only_the_admin_key_loads_and_what_cannot_be_served_is_said(
    llm: AsyncLLM, folder: Path
) -> None:
    async def visit() -> None:
        async with client_of(llm) as client:
            body = {"lora_name": "mine", "lora_path": str(folder)}
            assert (await client.post("/v1/load_lora_adapter", json=body)).status_code == 401
            for path in ("/v1/load_lora_adapter/", "/v1//load_lora_adapter"):
                assert (await client.post(path, json=body)).status_code in (401, 404)
            nothing = await load(client, "other", folder / "nothing")
            assert nothing.status_code == 400
            assert "no such folder" in nothing.json()["error"]["message"]
            assert (await client.get("/v1/models/other")).status_code == 404

    asyncio.run(visit())


@pytest.mark.parametrize("pattern", ["(", 5, "(?P<idx>h)"])
def test_a_config_that_cannot_be_read_is_the_callers_error(
    pattern: object, llm: AsyncLLM, folder: Path, tmp_path: Path
) -> None:
    copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    config |= {"layers_to_transform": [0], "layers_pattern": pattern}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))

    async def visit() -> None:
        async with client_of(llm) as client:
            answer = await load(client, "bad", tmp_path)
            assert answer.status_code == 400
            assert "layers_pattern" in answer.json()["error"]["message"]

    asyncio.run(visit())


def test_a_file_that_was_cut_off_is_the_callers_error_and_the_server_goes_on(
    llm: AsyncLLM, folder: Path, tmp_path: Path
) -> None:
    cut = Path(copytree(folder, tmp_path / "cut"))
    weights = cut / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])

    async def visit() -> None:
        async with client_of(llm) as client:
            refused = await load(client, "cut", cut)
            assert refused.status_code == 400
            assert "adapter_model.safetensors cannot be read" in refused.json()["error"]["message"]
            assert len(await say(client, MODEL)) == 4

    asyncio.run(visit())


def test_names_are_given_once() -> None:
    with pytest.raises(ValueError, match="'a' is given to more than one"):
        ServerSettings(served_model_names=("a",), lora_modules=(LoRAModulePath("a", "x"),))


def test_the_parent_of_an_adapter_is_the_name_of_the_model_that_it_was_given(
    llm: AsyncLLM, folder: Path
) -> None:
    modules = [
        LoRAModulePath("one", str(folder)),
        LoRAModulePath("two", str(folder), "other"),
        LoRAModulePath("three", str(folder), "of somebody"),
    ]

    async def visit() -> None:
        async with client_of(llm, "other") as client:
            await state_of(client).adapters.load_all(modules)
            cards = (await client.get("/v1/models")).json()["data"]
            parents = {card["id"]: card["parent"] for card in cards}
            none = {MODEL: None, "other": None}
            assert parents == {**none, "one": MODEL, "two": "other", "three": MODEL}
            for module in modules:
                await unload(client, module.name)

    asyncio.run(visit())


def test_an_adapter_is_replaced_in_place_and_those_who_have_chosen_it_are_served_by_it(
    llm: AsyncLLM, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of one folder change, as in a training."""
    path = tmp_path / "adapter"
    other = save_shipped_adapter(tmp_path / "other", seed=2)
    body = {"model": "mine", "prompt": "Hello " * 40, "max_tokens": 8, "temperature": 0}

    async def answer(client: httpx.AsyncClient) -> tuple[str, int]:
        found = (await client.post("/v1/completions", json=body)).raise_for_status().json()
        cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found["choices"][0]["text"], cached

    async def visit() -> None:
        async with client_of(llm) as client:
            copytree(folder, path)
            assert (await replace(client, "mine", path)).status_code == 200  # there was none
            old = (await answer(client))[0]
            assert (await answer(client))[1] > 0
            held = Held(llm, "prepare_grammar", monkeypatch)
            chosen = asyncio.create_task(answer(client))
            await held.begun.wait()
            monkeypatch.setattr(llm, "prepare_grammar", held.call)  # for this request alone
            copytree(other, path, dirs_exist_ok=True)
            assert (await load(client, "mine", path)).status_code == 400
            assert (await replace(client, "mine", path)).text.startswith("Success: LoRA adapter")
            new, num_cached = await answer(client)
            assert new != old
            assert num_cached == 0
            held.go.set()
            assert (await chosen)[0] == old
            assert len(await llm.list_loras()) == 1
            await load(client, "fresh", other)
            assert (await answer(client))[0] == new
            assert (await replace(client, "mine", tmp_path / "nothing")).status_code == 400
            assert (await replace(client, MODEL, path)).status_code == 400
            assert (await answer(client))[0] == new
            for name in ("mine", "fresh"):
                assert (await unload(client, name)).status_code == 200
        assert await llm.list_loras() == set()

    asyncio.run(asyncio.wait_for(visit(), 120))


def test_other_fields_are_as_everywhere_refused_where_they_are_known_and_else_ignored(
    llm: AsyncLLM, folder: Path
) -> None:
    async def visit() -> None:
        async with client_of(llm) as client:
            for more, status in (
                ({"is_3d_lora_weight": True}, 400),
                ({"load_inplace": "yes"}, 400),
                ({"load_inplace": False, "is_3d_lora_weight": False, "novelty": 1}, 200),
            ):
                answer = await load(client, "mine", folder, **more)
                assert answer.status_code == status
                if status == 400:
                    assert next(iter(more)) in answer.text
            body = {"lora_name": "mine", "lora_int_id": 5}
            answer = await client.post("/v1/unload_lora_adapter", json=body, headers=ADMIN)
            assert answer.status_code == 200

    asyncio.run(visit())


def test_a_name_that_goes_while_a_request_is_read_is_not_answered_by_the_model_itself(
    llm: AsyncLLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def visit() -> None:
        async with client_of(llm) as client:
            await load(client, "mine", folder)
            chats = Held(state_of(client).chat, "render", monkeypatch)
            body = {"model": "mine", "messages": QUESTION, "max_tokens": 4}
            asked = asyncio.create_task(client.post("/v1/chat/completions", json=body))
            await chats.begun.wait()
            await unload(client, "mine")
            chats.go.set()
            answer = await asked
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")

    asyncio.run(visit())


def test_a_request_that_has_chosen_is_served_by_an_adapter_that_goes_before_the_engine_has_it(
    llm: AsyncLLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def visit() -> None:
        async with client_of(llm) as client:
            await load(client, "mine", folder)
            body = {"model": "mine", "prompt": "Hello", "max_tokens": 8, "temperature": 0}
            expected = (await client.post("/v1/completions", json=body)).json()["choices"]
            held = Held(llm, "prepare_grammar", monkeypatch)
            asked = asyncio.create_task(client.post("/v1/completions", json=body))
            await held.begun.wait()
            await unload(client, "mine")
            held.go.set()
            assert (await asked).json()["choices"] == expected
        assert await llm.list_loras() == set()

    asyncio.run(visit())


def test_a_name_is_taken_while_it_is_loaded_and_served_only_then(
    llm: AsyncLLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def visit() -> None:
        held = Held(llm, "load_adapter", monkeypatch)
        async with client_of(llm) as client:
            loading = asyncio.create_task(load(client, "mine", folder))
            await held.begun.wait()
            assert (await load(client, "mine", folder)).status_code == 400
            assert (await unload(client, "mine")).status_code == 404
            body = {"model": "mine", "prompt": "Hello", "max_tokens": 1}
            assert (await client.post("/v1/completions", json=body)).status_code == 404
            held.go.set()
            assert (await loading).status_code == 200
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            assert (await unload(client, "mine")).status_code == 200
        assert await llm.list_loras() == set()

    asyncio.run(asyncio.wait_for(visit(), 120))
