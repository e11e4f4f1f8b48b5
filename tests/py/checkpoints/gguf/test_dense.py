"""What only some architectures of GGUF files without experts have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers as tf

torch = pytest.importorskip("torch")
pytest.importorskip("gguf")

from flexinfer.checkpoints.gguf.checkpoint import load_gguf_config
from flexinfer.errors import UnsupportedModelError
from flexinfer.models.loading import load_model
from helpers.gguf.answers import expected
from helpers.gguf.files import Type, write_gguf, writing
from helpers.gguf.models import COMMON, CONFIGS, same
from helpers.gguf.reading import read_with
from helpers.mixtures import generate
from helpers.tiny_models import draw_model, random_prompts


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


def test_the_largest_exaone_has_windows_that_its_file_may_leave_unsaid(tmp_path: Path) -> None:
    none = {"attention__sliding_window": None, "attention__sliding_window_pattern": None}
    config = read_with(tmp_path / "small.gguf", "exaone4", **none)
    assert config.sliding_window is None
    assert config.layer_types == ["full_attention"] * 5
    settings = {"num_hidden_layers": 64, "layer_types": None, "intermediate_size": 32}
    settings |= {"hidden_size": 32, "vocab_size": 16}
    config = read_with(tmp_path / "large.gguf", "exaone4", settings, **none)
    assert config.sliding_window == 4096
    assert config.layer_types == [*["sliding_attention"] * 3, "full_attention"] * 16


def test_windows_of_cohere_2_are_needed(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"has no cohere2\.attention\.sliding_window"):
        read_with(tmp_path / "model.gguf", "cohere2", attention__sliding_window=None)


@pytest.mark.parametrize("says", [True, False, None])
def test_stablelm_is_side_by_side_where_it_lacks_a_norm_whatever_the_file_says(
    says: bool | None, tmp_path: Path
) -> None:
    """Files of models whose configs say nothing of it say that it is."""
    for name, is_parallel in (("stablelm", False), ("stablelm side by side", True)):
        path = tmp_path / f"{name}.gguf"
        config = read_with(path, name, use_parallel_residual=says)
        assert config.use_parallel_residual is is_parallel


def test_norms_of_each_head_of_stablelm_are_rows_of_one_tensor(tmp_path: Path) -> None:
    config = tf.StableLmConfig(**COMMON, use_parallel_residual=True, qk_layernorm=True)
    path, model = tmp_path / "model.gguf", draw_model(config)
    with writing(path, model, same(Type.Q8_0)) as (writer, written):
        for layer, block in enumerate(written.model.layers):
            for part in "qk":
                norms = getattr(block.self_attn, f"{part}_layernorm").norms
                rows = torch.stack([norm.weight for norm in norms])
                writer.add_tensor(f"blk.{layer}.attn_{part}_norm.weight", rows.detach().numpy())
    prompts = random_prompts((5, 40))
    assert generate(path, prompts) == expected(written, prompts)


@pytest.mark.parametrize("rotated", [26, 30, 40, 52])
def test_as_many_numbers_of_a_head_are_rotated_as_the_file_says(
    rotated: int, tmp_path: Path
) -> None:
    """transformers has their share of 52: 30 became 29."""
    settings = {"head_dim": 52, "intermediate_size": 32, "vocab_size": 16}
    values = {"rope__dimension_count": rotated}
    config = read_with(tmp_path / "model.gguf", "glm4", settings, **values)
    assert int(52 * config.rope_parameters["partial_rotary_factor"]) == rotated


def write_apertus(path: Path, numbers: Any) -> str:
    """A file whose activations have these numbers as their alpha_p; None: it does not say it."""
    model = draw_model(CONFIGS["apertus"]())
    with writing(path, model, same(Type.F32)) as (writer, _):
        del writer.kv_data[0]["xielu.alpha_p"]
        if isinstance(numbers, float):
            writer.add_float32("xielu.alpha_p", numbers)
        elif numbers is not None:
            writer.add_array("xielu.alpha_p", numbers)
    return str(path)


def test_one_number_of_an_activation_is_of_all_layers(tmp_path: Path) -> None:
    config = load_gguf_config(write_apertus(tmp_path / "model.gguf", 1.25))
    assert config.xielu["alpha_p"] == [1.25, 1.25]


@pytest.mark.parametrize("numbers", [None, [1.0], [1.0, 2.0, 3.0], ["1", "2"]])
def test_activations_need_a_number_for_each_layer(numbers: Any, tmp_path: Path) -> None:
    path = write_apertus(tmp_path / "model.gguf", numbers)
    with pytest.raises(UnsupportedModelError, match=r"xielu\.alpha_p = .* for each of 2 layers"):
        load_gguf_config(path)


@pytest.mark.parametrize("bias", [True, False])
def test_glm_that_sees_images_has_rows_in_the_order_of_halves(bias: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    config = CONFIGS["glm4"](written_as="glm4v", attention_bias=bias)
    written = write_gguf(path, draw_model(config), same(Type.F32))
    prompts = random_prompts((5, 40))
    assert generate(path, prompts) == expected(written, prompts)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        (
            "olmo",
            {"attention__layer_norm_epsilon": 1e-6},
            "norm_epsilon = 9.99.*; known: only 1e-0",
        ),
        (
            "granite_swa",
            {"attention__sliding_window_pattern": None},
            "pattern = None; known: one for each layer",
        ),
        ("granite_swa", {"attention__rope_pattern": [True]}, "known: one for each of 3 layers"),
        ("granite_swa", {"attention__sliding_window": None}, "has no granite_swa.*window"),
    ],
)
def test_what_transformers_cannot_have_is_refused_by_name(
    name: str, values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_with(tmp_path / "model.gguf", name, **values)


def test_all_layers_are_rotated_where_the_file_says_of_none_that_it_is_not(tmp_path: Path) -> None:
    none = {"attention__rope_pattern": None}
    config = read_with(tmp_path / "model.gguf", "granite_swa", **none)
    assert config.layer_rope_theta == [1e4] * 3


def write_joined(path: Path, name: str, written_as: str, num_rows: int | None = None) -> Any:
    """A file whose queries, keys and values are one tensor, of its first rows alone."""
    model = draw_model(CONFIGS[name](written_as=written_as))
    with writing(path, model, same(Type.Q8_0)) as (writer, written):
        for layer, block in enumerate(written.model.layers):
            parts = [getattr(block.self_attn, f"{part}_proj") for part in "qkv"]
            for ending in ("weight", "bias"):
                joined = torch.cat([getattr(part, ending).detach() for part in parts])[:num_rows]
                writer.add_tensor(f"blk.{layer}.attn_qkv.{ending}", joined.numpy())
    return written


@pytest.mark.parametrize(
    ("name", "written_as"), [("chatglm", "glm joined"), ("phi2", "phi2 joined")]
)
def test_queries_keys_and_values_may_be_one_tensor(
    name: str, written_as: str, tmp_path: Path
) -> None:
    written = write_joined(tmp_path / "model.gguf", name, written_as)
    prompts = random_prompts((5, 40))
    assert generate(tmp_path / "model.gguf", prompts) == expected(written, prompts)


def test_joined_queries_keys_and_values_of_other_sizes_are_refused(tmp_path: Path) -> None:
    write_joined(tmp_path / "model.gguf", "chatglm", "glm joined", num_rows=448)
    with pytest.raises(UnsupportedModelError, match="of 448 rows; there have to be 512"):
        load_model(str(tmp_path / "model.gguf"))


def test_queries_that_are_there_twice_are_refused(tmp_path: Path) -> None:
    path, model = tmp_path / "model.gguf", draw_model(CONFIGS["chatglm"]())
    with writing(path, model, same(Type.F32)) as (writer, _):
        writer.add_tensor("blk.1.attn_qkv.weight", torch.zeros(512, 256).numpy())
    with pytest.raises(UnsupportedModelError, match=r"it has .*1.*q_proj\.weight and .*qkv_proj"):
        load_model(str(path))
