"""Where defaults of sampling come from, and which goes before which; no weight is read for it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from transformers import GenerationConfig

from flexinfer import LLM, SamplingParams
from flexinfer.config import EngineConfig
from flexinfer.engine.generation_config import FILE, WITHOUT_EFFECT, sampling_defaults
from flexinfer.errors import UnsupportedModelError
from flexinfer.sampling.defaults import SamplingDefaults
from helpers.advised import advise, advised_model
from helpers.engine_kit import make_engine
from helpers.tiny_models import CONFIGS, draw_model

QWEN3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
SAID = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}


def defaults_of(model: Any, **settings: Any) -> SamplingDefaults:
    return sampling_defaults(EngineConfig(model=model, **settings))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return advised_model(tmp_path / "model", **QWEN3, max_new_tokens=40)


def test_a_models_file_is_taken_by_default(folder: Path) -> None:
    found = defaults_of(folder)
    assert (found.values, found.max_tokens, found.max_tokens_limit) == (SAID, 40, None)


def test_vllm_takes_nothing_of_it(folder: Path) -> None:
    assert defaults_of(folder, generation_config="vllm") == SamplingDefaults()


def test_another_folders_file_replaces_it_and_bounds_all_answers(
    folder: Path, tmp_path: Path
) -> None:
    other = advise(tmp_path / "other", min_p=0.1, max_new_tokens=9)
    found = defaults_of(folder, generation_config=other)
    assert (found.values, found.max_tokens, found.max_tokens_limit) == ({"min_p": 0.1}, 9, 9)


@pytest.mark.parametrize("source", ["auto", "vllm"])
def test_an_override_goes_before_the_file(folder: Path, source: str) -> None:
    override = {"temperature": 0.2, "max_new_tokens": 5}
    found = defaults_of(folder, generation_config=source, override_generation_config=override)
    rest = SAID if source == "auto" else {}
    assert found.values == {**rest, "temperature": 0.2}
    assert (found.max_tokens, found.max_tokens_limit) == (5, 5)


def test_null_overrides_with_openais_default(folder: Path) -> None:
    found = defaults_of(folder, override_generation_config='{"temperature": null, "top_k": null}')
    assert found.values == {"top_p": 0.95}


def test_a_model_that_is_not_sampled_is_not_made_greedy_as_in_vllm(tmp_path: Path) -> None:
    folder = advised_model(tmp_path / "model", do_sample=False, top_p=0.9)
    assert defaults_of(folder).values == {"top_p": 0.9}


@pytest.mark.parametrize(
    "bad", [{"temperature": -1}, {"top_p": "high"}, {"top_k": 2.5}, {"max_new_tokens": 0}]
)
def test_a_value_that_no_request_may_have_is_refused_with_file_name_and_ways_out(
    folder: Path, bad: dict[str, Any]
) -> None:
    advise(folder, **bad)
    (name,) = bad
    with pytest.raises(UnsupportedModelError, match=f"{FILE}.*{name}.*--generation-config vllm"):
        defaults_of(folder)
    assert not defaults_of(folder, generation_config="vllm")
    assert not defaults_of(folder, override_generation_config={name: None})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"generation_config": ""}, "generation_config must be"),
        ({"generation_config": None}, "generation_config must be"),
        ({"override_generation_config": "{temperature: 1}"}, "override_generation_config is no J"),
        ({"override_generation_config": [1]}, "override_generation_config must be a mapping"),
        ({"override_generation_config": {"temperature": -1}}, "override_gen.*: temperature must"),
        ({"override_generation_config": {"max_tokens": 5}}, "has max_tokens.*max_new_tokens"),
    ],
)
def test_the_operators_part_is_checked_before_a_model_is_looked_at(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(model="nowhere", **given)


def test_a_folder_without_the_file_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"generation_config must be .* folder .*{FILE}"):
        defaults_of(folder, generation_config=tmp_path)


def test_a_folders_file_that_is_no_json_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("{")
    with pytest.raises(UnsupportedModelError, match="cannot be read as JSON"):
        defaults_of(folder, generation_config=tmp_path)


def test_a_model_may_have_no_such_file(folder: Path) -> None:
    (folder / FILE).unlink()
    assert not defaults_of(folder)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_hubs_file_is_that_of_the_cache(
    is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = tmp_path / "models--some--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    advise(cached / "snapshots" / "abc", temperature=0.3)
    if not is_there:  # which the cache knows of a commit, too
        (cached / "snapshots" / "abc" / FILE).unlink()
        (cached / ".no_exist" / "abc").mkdir(parents=True)
        (cached / ".no_exist" / "abc" / FILE).touch()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert defaults_of("some/model").values == ({"temperature": 0.3} if is_there else {})


def test_a_loaded_model_has_its_own(tmp_path: Path) -> None:
    model = draw_model(CONFIGS["llama"]())
    assert not defaults_of(model)
    model.generation_config.temperature = 0.4
    assert defaults_of(model).values == {"temperature": 0.4}


def test_what_transformers_would_heed_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert vars(GenerationConfig()).keys() >= WITHOUT_EFFECT.keys()
    folder = advise(tmp_path, **WITHOUT_EFFECT, top_k=5, eos_token_id=7)
    assert defaults_of(folder).values == {"top_k": 5}
    assert "passed over" not in caplog.text
    advise(tmp_path, top_k=5, typical_p=0.9, num_beams=4)
    assert defaults_of(folder).values == {"top_k": 5}
    assert "passed over here: num_beams 4, typical_p 0.9" in caplog.text


def test_the_log_says_which_are_taken_from_where(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    defaults_of(folder, override_generation_config={"top_k": 5})
    assert "temperature 0.6, top_p 0.95, top_k 5, max_tokens 40; from" in caplog.text
    assert f"{folder / FILE}' and override_generation_config" in caplog.text
    caplog.clear()
    defaults_of(folder, generation_config="vllm")
    assert not caplog.text


def test_an_engine_samples_by_them_where_a_request_has_no_params() -> None:
    greedy = {"temperature": 0, "max_new_tokens": 12}
    prompt = list(range(1, 9))
    engine = make_engine(override_generation_config=greedy)
    told = make_engine()
    engine.add_request("left out", prompt)
    told.add_request("said", prompt, SamplingParams(temperature=0, max_tokens=12))
    said = []
    for one in (engine, told):
        outputs = []
        while one.has_unfinished_requests():
            outputs += one.step()
        said.append(outputs[-1].outputs[0].token_ids)
        one.close()
    assert said[0] == said[1]
    assert len(said[0]) == 12


def test_calls_without_params_have_them_and_those_with_do_not(folder: Path) -> None:
    advise(folder, temperature=0, max_new_tokens=5, repetition_penalty=1.3)
    with LLM(str(folder), chunk_bytes="32KiB", kv_cache_memory_bytes=32 << 20) as llm:
        advised = llm.get_default_sampling_params()
        assert advised == SamplingParams(temperature=0, max_tokens=5, repetition_penalty=1.3)
        asked = [{"role": "user", "content": "Hello"}]
        left_out = llm.chat(asked, use_tqdm=False)[0].outputs[0]
        same = llm.chat(asked, advised, use_tqdm=False)[0].outputs[0]
        assert left_out.token_ids == same.token_ids
        with llm.conversation() as chat:
            assert len(chat.say("Hello").outputs[0].token_ids) <= 5
        streamed = [part for out in llm.stream("Hello") for part in out.outputs[0].token_ids]
        assert streamed == llm.generate("Hello", use_tqdm=False)[0].outputs[0].token_ids
        (said,) = llm.generate(
            "Hello", SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
        )
        assert len(said.outputs[0].token_ids) == 9
