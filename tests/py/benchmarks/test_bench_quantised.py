"""benchmarks/quantised: both sides get the same model, and rounds add up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("gguf")

from flexinfer import LLM, SamplingParams
from helpers.benchmark_modules import BENCHMARKS, fresh_benchmark_modules
from helpers.tiny_models import make_model, random_prompts

FOLDER = BENCHMARKS / "quantised"


def module_of(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    with fresh_benchmark_modules():
        return __import__(name)


def test_the_file_for_llama_cpp_has_the_folders_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import copy

    import torch

    model = copy.deepcopy(make_model("llama")).to(torch.bfloat16)
    model.resize_token_embeddings(300)
    model.save_pretrained(tmp_path)
    module_of("gguf_files", monkeypatch).write_gguf(tmp_path, tmp_path / "BF16.gguf")
    answers = []
    for source in (tmp_path, tmp_path / "BF16.gguf"):
        with LLM(str(source), skip_tokenizer_init=True, dtype="float32") as llm:
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            prompts = [{"prompt_token_ids": ids} for ids in random_prompts((20, 5))]
            outputs = llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
            answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]


def test_rounds_add_up_and_are_compared_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = [
        {"flexinfer int8": {"decode": [9, 10, 90]}, "llama.cpp Q8_0": {"decode": [5, 5, 5]}},
        {"flexinfer int8": {"decode": [30]}, "llama.cpp Q8_0": {"decode": [10]}},
        {"flexinfer int8": {"decode": [4]}, "llama.cpp Q8_0": {"decode": [4]}},
        {"flexinfer int8": {"prefill": [4]}},
    ]
    table = module_of("compare", monkeypatch)._table(rounds)
    row = {"flexinfer": 10, "llama.cpp": 5, "ratio": 2, "ratios": [1, 2, 3]}
    assert table == {"decode int8": row}


@pytest.mark.slow
def test_a_trained_model_is_measured(tmp_path: Path) -> None:
    """The training goes on from its checkpoint."""
    train = [sys.executable, str(BENCHMARKS.parent / "examples" / "small_llama" / "train.py")]
    folder, file = tmp_path / "model", tmp_path / "quality.json"
    options = ["--folder", str(folder), "--rows", "1", "--threads", "1"]
    for steps in ("1", "3"):
        subprocess.run([*train, *options, "--steps", steps], check=True, capture_output=True)
    record = json.loads((folder / "record.json").read_text())
    assert (record["steps"], record["tokens"]) == (3, 3 * 512)
    measure = [sys.executable, str(BENCHMARKS / "quality" / "quality.py"), "--quick"]
    options = ["--model", str(folder), "--ways", "bfloat16,int8", "--json", str(file)]
    subprocess.run([*measure, *options], check=True, capture_output=True)
    rows = json.loads(file.read_text())["results"]
    assert rows["int8"]["perplexity"] == pytest.approx(rows["bfloat16"]["perplexity"], rel=0.02)
    assert rows["int8"]["recall"] > 0
