"""load_format: what a model must be, and random weights of a config alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from flexinfer import LLM, SamplingParams, UnsupportedModelError
from flexinfer.models.loading import load_model

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def config_alone(model_path: str, tmp_path: Path) -> Path:
    """The folder without weights."""
    without = shutil.ignore_patterns("*.safetensors")
    return Path(shutil.copytree(model_path, tmp_path / "model", ignore=without))


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_model_of_random_weights_needs_a_config_alone(
    config_alone: Path, quantization: str | None
) -> None:
    state = torch.get_rng_state()
    tokens = []
    for _ in range(2):
        with LLM(
            str(config_alone),
            load_format="dummy",
            quantization=quantization,
            kv_cache_memory_bytes="8MiB",
        ) as llm:
            (output,) = llm.generate("hello", GREEDY, use_tqdm=False)
            tokens.append(output.outputs[0].token_ids)
    assert len(tokens[0]) == 6
    assert tokens[0] == tokens[1]
    assert torch.equal(torch.get_rng_state(), state)


def test_it_ends_where_its_generation_config_says(config_alone: Path) -> None:
    (config_alone / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert load_model(str(config_alone), load_format="dummy").eos_token_ids == {5, 7}


def test_weights_that_are_quantised_already_are_not_drawn(config_alone: Path) -> None:
    file = config_alone / "config.json"
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
    config = json.loads(file.read_text()) | {"quantization_config": settings}
    file.write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError):
        load_model(str(config_alone), load_format="dummy")


def test_a_model_in_another_format_is_refused(model_path: str) -> None:
    assert load_model(model_path, load_format="safetensors").vocab_size
    with pytest.raises(UnsupportedModelError, match=r"load_format='gguf' .* no GGUF file"):
        load_model(model_path, load_format="gguf")
    loaded = load_model(model_path).model
    with pytest.raises(UnsupportedModelError, match="the model given is loaded"):
        load_model(loaded, load_format="dummy")


def test_ranks_read_weights_that_there_are(model_path: str) -> None:
    with pytest.raises(ValueError, match="'dummy' does not go with tensor_parallel_size > 1"):
        LLM(model_path, load_format="dummy", tensor_parallel_size=2)


def test_a_format_of_another_server_is_refused_with_those_that_there_are(model_path: str) -> None:
    with pytest.raises(ValueError, match="load_format must be one of 'auto', 'safetensors', "):
        LLM(model_path, load_format="tensorizer")
