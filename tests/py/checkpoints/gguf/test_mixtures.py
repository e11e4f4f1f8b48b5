"""GGUF files of mixtures of experts: what only these have."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")

from flexinfer import LLM, SamplingParams
from flexinfer.checkpoints.gguf.checkpoint import GgufCheckpoint, load_gguf_config
from flexinfer.errors import UnsupportedModelError
from flexinfer.layers.experts import Experts
from flexinfer.models.loading import load_model
from helpers.gguf.answers import expected
from helpers.gguf.files import Type, add_weights, finish, write_gguf, writer_of, writing
from helpers.gguf.form import Form, Parts, replace_key
from helpers.gguf.forms import FORMS
from helpers.gguf.mixtures import MIXTURES
from helpers.gguf.models import CONFIGS, same
from helpers.gguf.parts import experts
from helpers.mixtures import generate
from helpers.tiny_models import draw_model, random_prompts

V2, V3, YOUTU = "deepseek2 as V2", "deepseek2 as V3", "deepseek2 as Youtu"
SAID = (
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "num_experts_per_tok"),
    *("n_routed_experts", "num_experts", "moe_num_experts", "moe_intermediate_size"),
    *("n_shared_experts", "moe_num_shared_experts", "shared_expert_intermediate_size"),
    *("first_k_dense_replace", "moe_layer_start_index", "moe_layer_interval"),
    *("norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group", "topk_method"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("head_dim", "rope_parameters", "intermediate_size", "use_qk_norm", "attention_bias"),
    *("qkv_bias", "use_bias", "moe_k", "moe_topk", "num_shared_experts", "route_scale"),
    *("shared_intermediate_size", "num_dense_layers", "layer_types", "sliding_window"),
    *("mlp_layer_types", "mup_enabled"),
)


def written_with(path: Path, name: str, values: dict[str, Any] | None = None) -> Any:
    """A file of a tiny model with other values; the model that it has."""
    model = draw_model(MIXTURES[name]())
    with writing(path, model, same(Type.F32)) as (writer, written):
        for key, value in (values or {}).items():
            replace_key(writer, key, value)
    return written


def check_tokens(path: Path, written: Any) -> None:
    """Those of the file are the model's."""
    prompts = random_prompts((5, 40))
    assert generate(path, prompts) == expected(written, prompts)


@pytest.mark.parametrize("name", MIXTURES)
def test_the_config_is_the_one_that_was_written(name: str, tmp_path: Path) -> None:
    config = written_with(tmp_path / "model.gguf", name).config
    found = load_gguf_config(str(tmp_path / "model.gguf"))
    assert type(found) is type(config)
    own = {field.name for field in dataclasses.fields(config)}
    for key in own & {*SAID}:
        expected = getattr(config, key, None)
        if isinstance(expected, float):
            expected = pytest.approx(expected)
        assert getattr(found, key, None) == expected, key


@pytest.mark.parametrize("name", [name for name in MIXTURES if "Youtu" not in name])
def test_experts_stay_quantised(name: str, tmp_path: Path) -> None:
    config = MIXTURES[name]()
    path = tmp_path / "model.gguf"
    write_gguf(path, draw_model(config), same(Type.Q8_0))
    model: Any = load_model(str(path)).model
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    assert experts
    for module in experts:
        numbers = 3 * config.hidden_size * width_of_experts(config) * count_of_experts(config)
        assert module.nbytes * 16 == numbers * 17


def width_of_experts(config: Any) -> int:
    return int(getattr(config, "moe_intermediate_size", config.intermediate_size))


def count_of_experts(config: Any) -> int:
    names = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
    return next(int(getattr(config, name)) for name in names if hasattr(config, name))


@pytest.mark.parametrize("kind", [Type.F32, Type.Q8_0])
def test_keys_and_values_may_be_one_tensor(
    kind: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As older files of DeepSeek's have them, which say the widths of heads, not of latents."""
    path, model = tmp_path / "model.gguf", draw_model(MIXTURES[V3]())
    writer = writer_of(path, model)
    config = model.config
    form = FORMS[config.model_type]
    monkeypatch.setitem(FORMS, config.model_type, Form(form.architecture, parts=experts))
    for key in ("attention.key_length_mla", "attention.value_length_mla"):
        del writer.kv_data[0][f"deepseek2.{key}"]
    replace_key(writer, "attention.key_length", config.qk_head_dim)
    replace_key(writer, "attention.value_length", config.v_head_dim)
    replace_key(writer, "attention.head_count_kv", config.num_attention_heads)
    written = add_weights(writer, model, same(kind))
    finish(writer)
    whole = GgufCheckpoint(str(path)).weights["model.layers.0.self_attn.kv_b_proj.weight"]
    assert whole.is_quantised == (kind != Type.F32)
    check_tokens(path, written)


def test_keys_and_values_in_halves_of_other_shapes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    written_with(path, V3, {"attention.value_length_mla": 64})
    with pytest.raises(UnsupportedModelError, match=r"\[4, 96, 128\]; there have to .* \[4, 64,"):
        GgufCheckpoint(str(path))


@pytest.mark.parametrize("name", [V2, V3])
def test_files_that_do_not_say_what_routers_do_tell_it_by_their_tensors(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    config = written_with(path, name, {"expert_gating_func": None}).config
    assert type(load_gguf_config(str(path))) is type(config)


@pytest.mark.parametrize("name", [V3, "glm4moe"])
def test_layers_beyond_the_last_are_left_out(name: str, tmp_path: Path) -> None:
    """They predict tokens beyond the next."""
    path, model = tmp_path / "model.gguf", draw_model(MIXTURES[name]())
    with writing(path, model, same(Type.F32)) as (writer, written):
        replace_key(writer, "nextn_predict_layers", 1)
        last = model.config.num_hidden_layers - 1
        writer.add_tensor(f"blk.{last}.nextn.eh_proj.weight", torch.zeros(256, 512).numpy())
    written.model.layers = written.model.layers[:last]
    written.config.num_hidden_layers = last
    assert load_gguf_config(str(path)).num_hidden_layers == last
    check_tokens(path, written)


@pytest.mark.parametrize(
    ("name", "key", "value", "known"),
    [
        (V2, "expert_weights_norm", True, "only False where expert_gating_func is 1"),
        (YOUTU, "leading_dense_block_count", 1, "only all layers, 2"),
        (V3, "expert_weights_norm", 1, "true and false"),
        (V3, "expert_weights_scale", 0.0, "numbers above 0"),
        (V3, "expert_gating_func", 3, "only 1 and 2"),
        (V3, "expert_group_count", 3, "only divisors of the expert_count, 8"),
        (V3, "expert_group_used_count", 5, "at most the expert_group_count, 4"),
        (V3, "leading_dense_block_count", 2.0, "whole numbers from 0 on"),
        (V3, "nextn_predict_layers", 3, "whole numbers from 0 on, less than the block_count, 3"),
        (V3, "attention.head_count_kv", 4, "only the one of latents, 1"),
        (V3, "attention.key_length", 96, "only the latents and what is rotated, 160"),
        (V3, "attention.value_length", 96, "only the latents, 128"),
        (V3, "rope.dimension_count", 96, "less than the width of keys, 96"),
        (
            V3,
            "rope.scaling.yarn_attn_factor",
            1.0,
            "none: rope.scaling.yarn_log_multiplier says it",
        ),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(
    name: str, key: str, value: Any, known: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    written_with(path, name, {key: value})
    message = re.escape(key) + ("" if known is None else rf" = .*; known: {known}$")
    with pytest.raises(UnsupportedModelError, match=message):
        load_gguf_config(str(path))


def test_routers_of_hunyuan_are_not_quantised(tmp_path: Path) -> None:
    """They have a name that others' have not."""
    path = tmp_path / "model.gguf"
    write_gguf(path, draw_model(MIXTURES["hunyuan-moe"]()), same(Type.F32))
    layer = load_model(str(path), quantization="int4").model.model.layers[0]
    assert type(layer.mlp.gate.wg) is torch.nn.Linear


@pytest.mark.parametrize("kind", [Type.F32, Type.Q4_K])
def test_gates_and_factors_of_experts_may_be_one_tensor(
    kind: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As llama.cpp's converter writes them by --fuse-gate-up-exps."""

    def fused(name: str, tensor: torch.Tensor, config: Any) -> Parts | None:
        if "gate_up_proj" not in name:
            return experts(name, tensor, config)
        return {f"blk.{name.split('.')[2]}.ffn_gate_up_exps.weight": tensor}

    path, form = tmp_path / "model.gguf", FORMS["qwen3_moe"]
    monkeypatch.setitem(FORMS, "qwen3_moe", Form(form.architecture, form.add_keys, fused))
    check_tokens(path, write_gguf(path, draw_model(CONFIGS["qwen3moe"]()), same(kind)))


def test_gates_of_experts_twice_are_refused(tmp_path: Path) -> None:
    path, model = tmp_path / "model.gguf", draw_model(CONFIGS["qwen3moe"]())
    with writing(path, model, same(Type.F32)) as (writer, _):
        writer.add_tensor("blk.0.ffn_gate_up_exps.weight", torch.zeros(6, 512, 256).numpy())
    with pytest.raises(
        UnsupportedModelError, match=r"gate_up_exps.* beside another .*experts\.0\."
    ):
        GgufCheckpoint(str(path))


@pytest.mark.parametrize("name", [V3, "minimax-m2", "ernie4_5-moe", "afmoe"])
def test_corrections_of_scores_are_not_rounded(name: str, tmp_path: Path) -> None:
    """With rounded ones other experts may be chosen."""
    path = tmp_path / "model.gguf"
    written = write_gguf(path, draw_model(MIXTURES[name]()), same(Type.Q8_0)).state_dict()
    with LLM(str(path), skip_tokenizer_init=True) as llm:
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        llm.generate([{"prompt_token_ids": [3, 4, 5]}], params, use_tqdm=False)
        loaded = llm.engine.loaded.model
        assert loaded.dtype == torch.bfloat16
        held = loaded.state_dict()
    found = {name: held[name] for name in held if name.endswith(("tion_bias", "expert_bias"))}
    assert found
    for key, numbers in found.items():
        assert torch.equal(numbers, written[key])
