"""GGUF files: what llama.cpp's converter writes as `general.sampling.*` is a generation config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")

from flexinfer import LLM
from flexinfer.config import EngineConfig
from flexinfer.engine.generation_config import OF_GGUF, sampling_defaults
from flexinfer.errors import UnsupportedModelError
from helpers.advised import advise
from helpers.gguf.files import Type, writing
from helpers.gguf.models import CONFIGS, same
from helpers.tiny_models import draw_model

SAID = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05}


def write(path: Path, add: Any) -> Path:
    model = draw_model(CONFIGS["llama"]())
    with writing(path, model, same(Type.Q8_0)) as (writer, _):
        add(writer)
    return path


def add_all(writer: Any) -> None:
    writer.add_sampling_temp(0.6)
    writer.add_sampling_top_p(0.95)
    writer.add_sampling_top_k(20)
    writer.add_sampling_min_p(0.05)
    writer.add_sampling_penalty_repeat(1.05)
    writer.add_sampling_mirostat(0)


def test_the_keys_are_those_of_the_gguf_package() -> None:
    keys = gguf.Keys.General
    assert list(OF_GGUF) == [
        keys.SAMPLING_TEMP,
        keys.SAMPLING_TOP_P,
        keys.SAMPLING_TOP_K,
        keys.SAMPLING_MIN_P,
        keys.SAMPLING_PENALTY_REPEAT,
    ]


def test_a_files_keys_are_its_defaults_and_numbers_those_that_were_written(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", add_all)
    with LLM(str(path), skip_tokenizer_init=True, kv_cache_memory_bytes=4 << 20) as llm:
        params = llm.get_default_sampling_params()
    assert {name: getattr(params, name) for name in SAID} == SAID


def test_what_is_passed_over_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def add(writer: Any) -> None:
        writer.add_sampling_top_k(20)
        writer.add_sampling_mirostat(2)
        writer.add_sampling_mirostat_tau(5.5)
        writer.add_sampling_xtc_probability(0.0)

    path = write(tmp_path / "model.gguf", add)
    assert sampling_defaults(EngineConfig(model=path)).values == {"top_k": 20}
    (told,) = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert told.endswith(
        "passed over here: general.sampling.mirostat 2, general.sampling.mirostat_tau 5.5"
    )


def test_the_operator_goes_before_the_file(tmp_path: Path) -> None:
    model = write(tmp_path / "model.gguf", add_all)
    override = EngineConfig(model=model, override_generation_config={"temperature": 0.2})
    assert sampling_defaults(override).values == {**SAID, "temperature": 0.2}
    assert not sampling_defaults(EngineConfig(model=model, generation_config="vllm"))
    other = advise(tmp_path / "other", top_p=0.5)
    elsewhere = EngineConfig(model=model, generation_config=other)
    assert sampling_defaults(elsewhere).values == {"top_p": 0.5}


def test_a_file_without_such_keys_has_none(tmp_path: Path) -> None:
    advise(tmp_path, temperature=0.1)  # beside it: of another model, as far as anybody knows
    path = write(tmp_path / "model.gguf", lambda writer: None)
    assert not sampling_defaults(EngineConfig(model=path))


@pytest.mark.parametrize(
    "add",
    [
        lambda writer: writer.add_sampling_temp(-1.0),
        lambda writer: writer.add_string("general.sampling.temp", "warm"),
    ],
)
def test_what_no_request_may_have_is_refused_by_the_files_name(tmp_path: Path, add: Any) -> None:
    path = write(tmp_path / "model.gguf", add)
    with pytest.raises(UnsupportedModelError, match=r"model\.gguf.*temperature must be"):
        sampling_defaults(EngineConfig(model=path))
