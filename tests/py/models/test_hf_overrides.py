"""hf_overrides: a config is what it would be if config.json had other values."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from flexinfer import LLM, SamplingParams, UnsupportedModelError
from flexinfer.config import EngineConfig
from flexinfer.models.loading import load_model
from flexinfer.models.model_config import resolve_config

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = list(range(3, 200))
YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 500.0,
    },
    "max_position_embeddings": 300,
}


def changed_copy(model_path: str, folder: Path, values: dict[str, Any]) -> str:
    shutil.copytree(model_path, folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config.pop("rope_theta", None)
    file.write_text(json.dumps(config | values))
    return str(folder)


def answer(model: str, **settings: Any) -> tuple[list[int], int]:
    """Tokens, and the longest request."""
    with LLM(model, kv_cache_memory_bytes="16MiB", **settings) as llm:
        (output,) = llm.generate({"prompt_token_ids": PROMPT}, GREEDY, use_tqdm=False)
        return output.outputs[0].token_ids, llm.llm_engine.max_model_len


def test_it_answers_as_a_folder_with_these_values(model_path: str, tmp_path: Path) -> None:
    copy = changed_copy(model_path, tmp_path / "copy", YARN)
    expected = answer(copy)
    assert expected[1] == 300
    assert answer(model_path, hf_overrides=YARN) == expected
    assert answer(model_path, hf_overrides=json.dumps(YARN), quantization="int8") == answer(
        copy, quantization="int8"
    )
    assert answer(model_path)[0] != expected[0]


@pytest.mark.parametrize(
    ("overrides", "name", "value"),
    [
        ({"rope_theta": 123.0}, "rope_parameters", {"rope_theta": 123.0, "rope_type": "default"}),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 7.0},
            "rope_parameters",
            {"rope_theta": 7.0, "rope_type": "linear", "factor": 2.0},
        ),
        ({"torch_dtype": "bfloat16"}, "dtype", torch.bfloat16),
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps", 1e-3),
        ({}, "rms_norm_eps", 1e-6),
    ],
)
def test_a_value_may_have_an_older_name(
    model_path: str, overrides: dict[str, Any], name: str, value: object
) -> None:
    plain, config = resolve_config(model_path), resolve_config(model_path, overrides)
    assert getattr(config, name) == value
    assert type(config) is type(plain)
    untouched = {key for key in plain.to_dict() if key != name}
    assert {key: config.to_dict()[key] for key in untouched} == {
        key: plain.to_dict()[key] for key in untouched
    }


def test_a_value_may_have_the_name_that_all_models_share(tmp_path: Path) -> None:
    transformers.GPT2Config(n_positions=64).save_pretrained(tmp_path)
    assert resolve_config(str(tmp_path), {"max_position_embeddings": 32}).n_positions == 32


def test_kinds_of_layers_have_rotations_of_their_own(tmp_path: Path) -> None:
    transformers.Gemma3TextConfig(vocab_size=64, num_hidden_layers=2).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"those of .*full_attention.* for 'rope_theta'"):
        resolve_config(str(tmp_path), {"rope_theta": 5.0})
    given = {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}
    found = resolve_config(str(tmp_path), given).rope_parameters
    assert found["full_attention"]["rope_theta"] == 5.0
    assert found["sliding_attention"]["rope_theta"] == 10000.0


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"rms_norm_epsilon": 1e-3}, "the model's config has no 'rms_norm_epsilon'; did you mean"),
        ({"model_type": "none such"}, "model_type 'none such' is none of transformers' own"),
        ({"num_attention_heads": "many"}, "hf_overrides: "),
        ([1], "hf_overrides must be a mapping"),
        ("{", "hf_overrides is no JSON"),
        (lambda config: config, "hf_overrides must be a mapping"),
    ],
)
def test_what_the_config_does_not_have_is_refused(
    model_path: str, overrides: object, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexinfer.models.loading._load_weights", no_weights)
    with pytest.raises(ValueError, match=says):
        LLM(model_path, hf_overrides=overrides, kv_cache_memory_bytes="16MiB")


def no_weights(*_: object) -> None:
    pytest.fail("weights read")


def test_weights_of_another_shape_are_refused(model_path: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"config.json asks for \[64, 64\]"):
        load_model(model_path, hf_overrides={"intermediate_size": 64})


def test_a_model_that_is_loaded_keeps_its_config(model_path: str) -> None:
    loaded = load_model(model_path).model
    with pytest.raises(ValueError, match="the model given is loaded"):
        LLM(loaded, tokenizer=model_path, hf_overrides={"rms_norm_eps": 1e-3})


def test_the_engine_has_what_was_given_parsed(model_path: str) -> None:
    config = EngineConfig(model=model_path, hf_overrides='{"rms_norm_eps": 0.1}')
    assert config.hf_overrides == {"rms_norm_eps": 0.1}
