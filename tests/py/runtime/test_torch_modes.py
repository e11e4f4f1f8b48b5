"""An engine says in a caller's modes of torch what it says without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("gguf")

from flexinfer import LLM, SamplingParams
from flexinfer.runtime.torch_modes import plain_modes
from helpers.gguf.files import Type, write_gguf
from helpers.gguf.models import CONFIGS, same
from helpers.tiny_models import draw_model, save_chat_model

MODES: dict[str, Callable[[], Any]] = {
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default device": lambda: torch.device("meta"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    stored = str(folder / "qwen3next.gguf")  # some of whose matrices several threads write
    write_gguf(Path(stored), draw_model(CONFIGS["qwen3next"]()), same(Type.Q8_0))
    return {"folder": save_chat_model(folder / "chat"), "file": stored}


def answer(model: str) -> list[int]:
    with LLM(model, skip_tokenizer_init=True, kv_cache_memory_bytes="4MiB", dtype="float32") as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        (output,) = llm.generate({"prompt_token_ids": [1, 2, 3, 4]}, params, use_tqdm=False)
        return list(output.outputs[0].token_ids)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", ["folder", "file"])
def test_an_engine_does_not_take_over_its_callers_modes(
    models: dict[str, str], model: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading in inference mode, and steps in autocast, ended in errors of torch."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # pieces of a weight have threads
    expected = answer(models[model])
    with MODES[mode]():
        assert answer(models[model]) == expected


@pytest.mark.parametrize("mode", MODES)
def test_the_modes_are_the_callers_again_behind_it(mode: str) -> None:
    def found() -> tuple[bool, bool, str]:
        is_inference = torch.is_inference_mode_enabled()
        return is_inference, torch.is_autocast_enabled("cpu"), torch.get_default_device().type

    with MODES[mode]():
        before = found()
        with plain_modes():
            assert found() == (False, False, "cpu")
        assert found() == before != (False, False, "cpu")
