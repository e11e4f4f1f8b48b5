"""A compiled model is one graph, however the batch looks, and generates the same tokens."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._dynamo.utils import counters

from flexinfer import LLM, SamplingParams
from helpers.tiny_models import make_model, random_prompts, reference

PROMPTS = random_prompts((5, 17, 40, 1, 9, 30))
GREEDY = SamplingParams(temperature=0, max_tokens=10)


def check(name: str, folder: Path) -> None:
    make_model(name).save_pretrained(folder)
    torch._dynamo.reset()
    counters.clear()
    settings = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 64 << 20}
    with LLM(str(folder), compile=True, max_num_seqs=4, **settings) as llm:
        for _ in range(2):
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            answers = [output.outputs[0].token_ids for output in outputs]
            assert answers == [reference(name, tuple(prompt), 10) for prompt in PROMPTS]
    assert sum(counters["graph_break"].values()) == 0
    # One for any batch; one token, one row of logits and none are special to torch.compile.
    assert 1 <= counters["stats"]["unique_graphs"] <= 6


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_model_is_one_graph(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured as it is for the engine, and run as it was captured, without generated code."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    check(name, tmp_path)


@torch._dynamo.config.patch(recompile_limit=2)
def test_engines_of_one_process_have_graphs_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch keeps few for a function, eight if nobody says otherwise, and then fails."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    make_model("four_kv_heads").save_pretrained(tmp_path)
    torch._dynamo.reset()
    answers = [answers_of(tmp_path, compile=True) for _ in range(3)]
    assert answers == 3 * [[reference("four_kv_heads", tuple(p), 10) for p in PROMPTS]]


def answers_of(folder: Path, **settings: Any) -> list[list[int]]:
    """Of an engine of their own."""
    settings |= {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 64 << 20}
    with LLM(str(folder), **settings) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]


def test_in_bfloat16_it_says_what_the_eager_model_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that rounds is in operators, which are the functions of the eager model."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    make_model("llama").save_pretrained(tmp_path)
    torch._dynamo.reset()
    answers = [answers_of(tmp_path, compile=own, dtype="bfloat16") for own in (False, True)]
    assert answers[0] == answers[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_compiled_models_match(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)
