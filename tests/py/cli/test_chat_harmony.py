"""`flexinfer chat` with a model of gpt-oss' form: what the terminal shows of its messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from flexinfer import LLM
from flexinfer.cli.chat.harmony_text import HarmonyText
from flexinfer.cli.chat.local import LocalBackend, LocalSession
from flexinfer.cli.chat.sampling import ChatSampling
from flexinfer.cli.settings import EngineSettings
from flexinfer.sampling.grammars import StructuredOutputsParams
from helpers.harmony import MARKS, save_harmony_model
from helpers.tiny_models import save_chat_model

NEXT = "<|start|>assistant"
THINK = f"<|channel|>analysis<|message|>Hm <3.<|end|>{NEXT}"
FINAL = "<|channel|>final<|message|>Hot.<|return|>"
SHOWN = [
    (THINK + FINAL, "<think>\nHm <3.\n</think>\n\nHot."),
    (FINAL, "Hot."),
    ("Hot.", "Hot."),
    (f"<|channel|>commentary<|message|>Wait.<|end|>{NEXT}{FINAL}", "Wait.\nHot."),
    # As with others, what max_tokens cuts has no closing tag.
    ("<|channel|>analysis<|message|>Hm", "<think>\nHm"),
    ("<|channel|>anal", ""),
    (
        f"{THINK}<|channel|>analysis<|message|>So.<|end|>{NEXT}{FINAL}",
        "<think>\nHm <3.\nSo.\n</think>\n\nHot.",
    ),
    ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>", "{}"),
]


@pytest.mark.parametrize(("text", "shown"), SHOWN)
def test_thoughts_are_shown_between_tags_however_they_come(text: str, shown: str) -> None:
    assert HarmonyText().read(text, is_last=True) == shown
    cut = HarmonyText()
    pieces = [cut.read(char, is_last=False) for char in text]
    assert "".join([*pieces, cut.read("", is_last=True)]) == shown


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBackend]:
    folder = save_harmony_model(tmp_path_factory.mktemp("gpt-oss"))
    made = LocalBackend(EngineSettings(model=folder, memory="16MiB"))
    yield made
    made.close()


@dataclass(frozen=True, kw_only=True)
class Scripted(ChatSampling):
    """Draws one text."""

    structured_outputs: StructuredOutputsParams


def saying(llm: LLM, text: str, **more: int) -> ChatSampling:
    """Of a model that can say this alone."""
    parts = [part for part in re.split(r"(<\|\w+\|>)", text) if part]
    ids = llm.get_tokenizer().get_vocab()
    words = [f"<[{ids[part]}]>" if part in MARKS else json.dumps(part) for part in parts]
    structure = StructuredOutputsParams(grammar=f"start: {' '.join(words)}")
    return Scripted(**{"max_tokens": 200, **more}, structured_outputs=structure)


def test_a_session_shows_thoughts_and_remembers_answers(backend: LocalBackend) -> None:
    session = backend.session("Be kind.")
    assert isinstance(session, LocalSession)
    params = saying(backend._llm, THINK + FINAL)
    pieces = list(session.say("Is it hot?", params))
    assert "".join(pieces) == "<think>\nHm <3.\n</think>\n\nHot."
    assert len([piece for piece in pieces if piece]) > 5
    assert session.messages[-1] == {"role": "assistant", "content": "Hot."}
    fork = session.fork()
    first = session.numbers.num_prompt_tokens
    assert "".join(fork.say("Why?", params)).startswith("<think>")
    assert (fork.numbers.num_cached_tokens or 0) >= (first or 0) > 0


def test_an_answer_that_is_cut_shows_what_there_is(backend: LocalBackend) -> None:
    session = backend.session("")
    num_tokens = len(backend._llm.get_tokenizer()("<|channel|>analysis<|message|>Hm").input_ids)
    params = saying(backend._llm, THINK + FINAL, max_tokens=num_tokens)
    assert "".join(session.say("Is it hot?", params)) == "<think>\nHm"
    assert session.numbers.finish_reason == "length"
    assert session.messages[-1]["content"] == ""


def test_models_of_other_forms_are_shown_as_they_write(tmp_path: Path) -> None:
    backend = LocalBackend(EngineSettings(model=save_chat_model(tmp_path), memory="16MiB"))
    params = saying(backend._llm, "<think>Hm</think>analysis")
    assert "".join(backend.session("").say("Hi", params)) == "<think>Hm</think>analysis"
    backend.close()
