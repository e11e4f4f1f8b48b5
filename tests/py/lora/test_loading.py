"""Adapters are read in threads that nobody waits for, and serve those that have chosen them."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer import AsyncLLM, EngineDeadError, LoRARequest, RequestError
from flexinfer.lora.peft_folder import CONFIG, MAX_CONFIG_BYTES, WEIGHTS, PeftFolder
from flexinfer.lora.places import Places
from helpers.async_kit import GREEDY, last, with_llm
from helpers.lora_kit import merged_reference, request_for, save_adapter
from helpers.tiny_models import random_prompts, reference

PROMPT = random_prompts((20,))[0]
NUM_NEW = 12
WAIT_S = 120


class HeldReads:
    """Reads of adapters' files, which wait until `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.threads: list[str] = []
        self.num_torch_threads: list[int] = []
        read = PeftFolder.read

        def held(folder: PeftFolder) -> Any:
            self.threads.append(threading.current_thread().name)
            self.num_torch_threads.append(torch.get_num_threads())
            self.begun.set()
            assert self.go.wait(WAIT_S), "others waited for this read"
            return read(folder)

        monkeypatch.setattr(PeftFolder, "read", held)

    async def wait_until_begun(self) -> None:
        assert await asyncio.to_thread(self.begun.wait, WAIT_S)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldReads]:
    """With two threads for all others, as on most machines."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield HeldReads(monkeypatch)
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = save_adapter(tmp_path_factory.mktemp("adapters") / "a")
    reference("llama", tuple(PROMPT), NUM_NEW)  # before an engine's thread uses the same model
    merged_reference("llama", made, PROMPT, NUM_NEW)
    return made


async def tokens(llm: AsyncLLM, lora: Any) -> list[int]:
    outputs = llm.generate({"prompt_token_ids": PROMPT}, GREEDY, lora_request=lora)
    return list((await last(outputs)).outputs[0].token_ids)


def num_updates(llm: AsyncLLM) -> int:
    places = llm._adapters._places
    return sum(len(places[path].adapters.updates) for path in places)


@pytest.mark.parametrize("asked_by", ["add_lora", "generate"])
def test_others_are_served_while_an_adapter_is_read(
    asked_by: str, folder: Path, reads: HeldReads
) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        lora = request_for(folder, 1)
        assert lora is not None
        asked = llm.add_lora(lora) if asked_by == "add_lora" else tokens(llm, lora)
        loading = asyncio.create_task(asked)
        await reads.wait_until_begun()
        assert await tokens(llm, None) == reference("llama", tuple(PROMPT), NUM_NEW)
        assert not reads.go.is_set()
        assert not loading.done()
        reads.go.set()
        expected = merged_reference("llama", folder, PROMPT, NUM_NEW)
        assert await loading == (True if asked_by == "add_lora" else expected)
        assert await tokens(llm, lora) == expected
        assert reads.threads == ["flexinfer-adapter_0"]
        assert reads.num_torch_threads == [1]

    with_llm(scenario, enable_lora=True)


@pytest.fixture
def ends_if_all_stands_still() -> Iterator[None]:
    """A thread that holds the interpreter's lock for ever holds up pytest's own limit, too."""
    faulthandler.dump_traceback_later(WAIT_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.usefixtures("ends_if_all_stands_still")
def test_others_are_served_while_an_expression_backtracks_for_ever(
    folder: Path, tmp_path: Path
) -> None:
    endless = save_adapter(tmp_path / "b", target_modules="(([a-z_.0-9]+)*)*!")

    async def scenario(llm: AsyncLLM) -> None:
        bad, good = request_for(endless, 1), request_for(folder, 2)
        assert bad is not None
        assert good is not None
        loading = asyncio.create_task(llm.add_lora(bad))
        assert await tokens(llm, good) == merged_reference("llama", folder, PROMPT, NUM_NEW)
        with pytest.raises(RequestError, match=r"target_modules .* takes longer than 1 s"):
            await loading

    with_llm(scenario, enable_lora=True)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("name", "make", "match"),
    [
        (CONFIG, os.mkfifo, f"has no file {CONFIG}"),
        (CONFIG, lambda path: path.symlink_to("/dev/null"), f"has no file {CONFIG}"),
        (CONFIG, lambda path: path.write_text(" " * 2**20 + "{}"), f"more than {MAX_CONFIG_BYTES}"),
        (WEIGHTS, os.mkfifo, f"has no file {WEIGHTS}"),
    ],
)
def test_a_file_that_might_never_end_is_not_read(
    name: str, make: Callable[[Path], None], match: str, tmp_path: Path
) -> None:
    save_adapter(tmp_path)
    (tmp_path / name).unlink()
    make(tmp_path / name)
    with pytest.raises(RequestError, match=match):
        PeftFolder("a", str(tmp_path), Places(None), max_rank=16)


def test_all_who_ask_meanwhile_wait_for_one_read_and_who_goes_takes_none_along(
    folder: Path, reads: HeldReads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexinfer.lora.adapters.NUM_THREADS", 1)

    async def scenario(llm: AsyncLLM) -> None:
        lora, other = request_for(folder, 1), request_for(folder, 2)
        assert lora is not None
        assert other is not None
        before = asyncio.create_task(llm.add_lora(other))
        await reads.wait_until_begun()
        first, *others = [asyncio.create_task(tokens(llm, lora)) for _ in range(3)]
        while lora not in llm._adapters._being_read:
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        reads.go.set()
        expected = merged_reference("llama", folder, PROMPT, NUM_NEW)
        assert await asyncio.gather(*others) == [expected, expected]
        assert await before
        assert len(reads.threads) == 2
        assert await llm.list_loras() == {1, 2}

    with_llm(scenario, enable_lora=True)


def test_what_cannot_be_served_is_said_and_may_be_repaired(tmp_path: Path) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        lora = LoRARequest("a", 1, str(tmp_path / "a"))
        for _ in range(2):
            with pytest.raises(RequestError, match="there is no such folder"):
                await tokens(llm, lora)
        save_adapter(tmp_path / "a")
        assert await llm.add_lora(lora)
        with pytest.raises(RequestError, match="lora_int_id 1 is the adapter 'a'"):
            await llm.add_lora(LoRARequest("b", 1, str(tmp_path / "a")))
        llm.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await llm.add_lora(LoRARequest("b", 2, str(tmp_path / "a")))

    with_llm(scenario, enable_lora=True)


def test_a_request_that_chose_just_before_the_removal_is_served_and_loads_nothing(
    folder: Path,
) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        lora = request_for(folder, 1)
        assert lora is not None
        chosen = await llm.load_adapter(lora)
        assert await llm.remove_lora(1)
        assert num_updates(llm) == 0
        expected = merged_reference("llama", folder, PROMPT, NUM_NEW)
        assert await asyncio.gather(*(tokens(llm, chosen) for _ in range(3))) == [expected] * 3
        assert await llm.list_loras() == set()
        assert num_updates(llm) == 0

    with_llm(scenario, enable_lora=True)
