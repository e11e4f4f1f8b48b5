"""What a GGUF file says of its architecture becomes the config that transformers has."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")

from flexinfer.checkpoints.gguf.architectures import ARCHITECTURES
from flexinfer.checkpoints.gguf.checkpoint import is_gguf, load_gguf_config
from flexinfer.errors import UnsupportedModelError
from helpers.gguf.files import Type, write_gguf, writing
from helpers.gguf.forms import FORMS
from helpers.gguf.models import CONFIGS, same
from helpers.gguf.reading import read_with
from helpers.tiny_models import draw_model

SAID = (
    *("sliding_window", "layer_types", "no_rope_layers", "rope_parameters"),
    *("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
    *("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
    *("attention_bias", "mlp_bias", "use_bias", "use_qkv_bias"),
    *("original_max_position_embeddings", "use_parallel_residual", "use_qk_norm", "logit_scale"),
    *("layer_norm_eps", "norm_epsilon", "norm_eps", "xielu", "clip_qkv", "layer_rope_theta"),
    *("conv_L_cache", "norm_eps", "num_dense_layers", "moe_intermediate_size"),
    *("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv"),
    *("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"),
    *("layers_block_type", "layer_norm_epsilon", "use_conv_bias", "intermediate_size"),
    *("mamba_d_ssm", "mamba_rms_norm", "mamba_norm_before_gate"),
    *("layers_num_experts", "mamba_dt_rank"),
    *("mamba_expand", "mamba_conv_bias", "shared_intermediate_size", "position_embedding_type"),
    *("linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads"),
    *("linear_num_value_heads", "linear_conv_kernel_dim", "num_experts", "num_experts_per_tok"),
    *("moe_intermediate_size", "shared_expert_intermediate_size"),
    *("n_routed_experts", "moe_shared_expert_intermediate_size", "moe_latent_size", "n_group"),
    *("topk_group", "norm_topk_prob", "routed_scaling_factor", "n_shared_experts"),
    *("enable_moe_block", "top_k_experts"),
)
UNSAID = {
    "nemotron_h": {"num_experts_per_tok", "moe_intermediate_size"},
    "nemotron_h_moe": {"intermediate_size"},
    "nemotron_h_moe with latents": {"intermediate_size"},
    "qwen3next": {"intermediate_size"},
}
"""What no layer of a model has a use for."""


@pytest.mark.parametrize("name", CONFIGS)
def test_what_only_some_have_is_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = draw_model(CONFIGS[name]())
    write_gguf(path, model, same(Type.F32))
    found = load_gguf_config(str(path))
    told = set(SAID) - UNSAID.get(name, set())
    for key in filter(partial(hasattr, model.config), told):
        expected = getattr(model.config, key)
        if isinstance(expected, float):
            expected = pytest.approx(expected)
        assert getattr(found, key, None) == expected, key


@pytest.mark.parametrize("window", [0, None])
def test_gemma_3_without_windows(window: int | None, tmp_path: Path) -> None:
    path, kinds = tmp_path / "model.gguf", ["full_attention"] * 7
    model = draw_model(CONFIGS["gemma3"](layer_types=kinds))
    with writing(path, model, same(Type.F32)) as (writer, _):
        del writer.kv_data[0]["gemma3.attention.sliding_window"]
        if window is not None:
            writer.add_sliding_window(window)
    assert load_gguf_config(str(path)).layer_types == kinds


@pytest.mark.parametrize(("name", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_queries_of_the_largest_gemma_are_scaled_by_another_width(name: str, layers: int) -> None:
    """As llama.cpp has it, which knows the model by its number of layers."""
    values: Any = {"embedding_length": 96, "attention.head_count": 4, "attention.key_length": 16}

    class Values:
        """Those of a file."""

        def get(self, key: str, default: Any = None) -> Any:
            return values.get(key, default)

        count = factor = get

        def num_layers(self) -> int:
            return int(values["block_count"])

        def of_layers(self, _: str) -> None:
            return None

    for num_layers, expected in ((layers, 24), (layers - 1, 16)):
        values["block_count"] = num_layers
        settings = ARCHITECTURES[name].settings(Values())  # type: ignore[arg-type]
        assert settings["query_pre_attn_scalar"] == expected


def test_a_window_where_there_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(
        path, draw_model(CONFIGS["qwen2"]()), same(Type.F32), {"attention.sliding_window": 16.0}
    )
    with pytest.raises(UnsupportedModelError, match=r"qwen2\.attention\.sliding_window"):
        load_gguf_config(str(path))


def test_every_architecture_is_written_by_these_tests() -> None:
    assert {form.architecture for form in FORMS.values()} == ARCHITECTURES.keys()


def test_a_window_for_each_layer(tmp_path: Path) -> None:
    windows = [True, False, True, True, False, True, False]
    key = "attention__sliding_window_pattern"
    kinds = read_with(tmp_path / "model.gguf", "gemma3", **{key: windows}).layer_types
    assert kinds == ["sliding_attention" if w else "full_attention" for w in windows]
    with pytest.raises(UnsupportedModelError, match="one for each of 7 layers"):
        read_with(tmp_path / "fewer.gguf", "gemma3", **{key: windows[1:]})


def test_values_of_layers_that_are_all_equal_are_one(tmp_path: Path) -> None:
    key = "attention__head_count_kv"
    assert read_with(tmp_path / "m.gguf", "llama", **{key: [2, 2]}).num_key_value_heads == 2
    with pytest.raises(UnsupportedModelError, match=r"one for each layer of llama\.attention"):
        read_with(tmp_path / "model.gguf", "llama", **{key: [2, 4]})


@pytest.mark.parametrize(
    ("key", "known", "other"),
    [
        ("attention__causal", True, False),
        ("expert_weights_norm", True, False),
        ("pooling_type", 0, 1),
    ],
)
def test_keys_of_which_one_value_is_known(key: str, known: Any, other: Any, tmp_path: Path) -> None:
    read_with(tmp_path / "known.gguf", "llama", **{key: known})
    with pytest.raises(UnsupportedModelError, match=rf"{key.replace('__', '.')} = {other}"):
        read_with(tmp_path / "other.gguf", "llama", **{key: other})


def test_a_factor_of_scores_is_of_yarn_alone(tmp_path: Path) -> None:
    key = "rope__scaling__yarn_attn_factor"
    read_with(tmp_path / "one.gguf", "llama", **{key: 1.0})
    with pytest.raises(UnsupportedModelError, match=r"yarn_attn_factor = 0\.5"):
        read_with(tmp_path / "other.gguf", "llama", **{key: 0.5})


def test_granite_without_rotary_embeddings_is_refused(tmp_path: Path) -> None:
    key = "rope__scaling__finetuned"
    read_with(tmp_path / "llama.gguf", "llama", **{key: False})  # says nothing there
    with pytest.raises(UnsupportedModelError, match="finetuned = False"):
        read_with(tmp_path / "granite.gguf", "granite", **{key: False})


@pytest.mark.parametrize("name", ["MODEL.GGUF", "sha256-0123abcd"])
def test_a_file_is_known_by_its_first_bytes_too(name: str, tmp_path: Path) -> None:
    read_with(tmp_path / name, "llama")
    assert is_gguf(tmp_path / name)
    (tmp_path / "text").write_text("GGU")
    assert not is_gguf(tmp_path / "text")
    assert not is_gguf(tmp_path)
    assert is_gguf("not/there.gguf")
