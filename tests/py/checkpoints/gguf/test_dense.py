"""What only some architectures of GGUF files without experts have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("gguf")

from flexinfer.errors import UnsupportedModelError
from helpers.gguf.reading import read_with


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("olmo3", {}, "Olmo3Config"),
        ("olmo3", {"attention__sliding_window": 0}, "Olmo2Config"),
        ("olmo2", {}, "Olmo2Config"),
        ("ministral3", {}, "Ministral3Config"),
        ("ministral3", {"attention__temperature_scale": 0.0}, "MistralConfig"),
        ("mistral3", {}, "MistralConfig"),
    ],
)
def test_files_of_one_name_have_one_of_two_models(
    name: str, values: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    config = read_with(tmp_path / "model.gguf", name, **values)
    assert type(config).__name__ == expected


def test_scores_are_multiplied_as_older_files_say_it_too(tmp_path: Path) -> None:
    """As published OLMo 3: llama.cpp reads neither of the keys as the config means them."""
    old = {"rope__scaling__yarn_attn_factor": None, "rope__scaling__attn_factor": 1.75}
    rope = read_with(tmp_path / "old.gguf", "olmo3", **old).rope_parameters
    assert rope["full_attention"]["attention_factor"] == 1.75
    assert rope["sliding_attention"] == {"rope_type": "default", "rope_theta": 1e4}


def test_layers_with_a_window_rotate_as_others_where_the_file_has_no_other_base(
    tmp_path: Path,
) -> None:
    rope = read_with(tmp_path / "m.gguf", "olmo3", rope__freq_base_swa=None).rope_parameters
    assert rope["sliding_attention"] == {"rope_type": "default", "rope_theta": 1e5}


def test_queries_that_are_scaled_by_their_position_need_a_length(tmp_path: Path) -> None:
    none = {"rope__scaling__original_context_length": None, "rope__scaling__type": "none"}
    with pytest.raises(UnsupportedModelError, match=r"has no mistral3.*original_context_length"):
        read_with(tmp_path / "model.gguf", "ministral3", **none)


@pytest.mark.parametrize(
    ("name", "key"),
    [("qwen2", "rope__dimension_sections"), ("qwen2vl", "n_deepstack_layers")],
)
def test_what_is_of_images_is_known_in_their_models_alone(
    name: str, key: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=key.replace("__", ".")):
        read_with(tmp_path / "model.gguf", name, **{key: 2})
