"""Models of GGUF files in which some layers have a state in place of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")

from flexinfer.checkpoints.gguf.checkpoint import GgufCheckpoint, load_gguf_config
from flexinfer.errors import UnsupportedModelError
from flexinfer.layers.experts import Experts
from flexinfer.layers.quantised_linear import QuantisedLinear
from flexinfer.models.loading import load_model
from helpers.gguf.answers import expected
from helpers.gguf.files import Type, write_gguf, writing
from helpers.gguf.form import replace_key
from helpers.gguf.hybrid_forms import add_mamba2
from helpers.gguf.models import CONFIGS, mixed, same
from helpers.gguf.reading import read_with
from helpers.mixtures import generate
from helpers.tiny_models import draw_model, random_prompts

KV_HEADS, SHARED = "attention.head_count_kv", "expert_shared_feed_forward_length"
FEW = 4096
"""Numbers of the largest weight that is kept as numbers: a convolution's, or a router's."""


NEMOTRON_3 = ("nemotron_h_moe", "nemotron_h_moe with latents")


@pytest.mark.parametrize(
    "name", ["lfm2", "lfm2moe", "granitehybrid", "granitehybrid with experts", *NEMOTRON_3]
)
def test_matrices_of_mixers_stay_quantised(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, draw_model(CONFIGS[name]()), mixed)
    model: Any = load_model(str(path)).model
    assert max(parameter.numel() for parameter in model.parameters()) <= FEW
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_gates_and_factors_of_unlike_types_stay_quantised(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    gates = ("ffn_gate.weight", "ffn_gate_shexp.weight")
    written = write_gguf(
        path,
        draw_model(CONFIGS["granitehybrid"]()),
        lambda name: Type.Q6_K if name.endswith(gates) else Type.Q4_0,
    )
    model: Any = load_model(str(path), dtype=torch.float32).model
    own, theirs = (m.get_submodule("model.layers.0.shared_mlp") for m in (model, written))
    assert isinstance(own.input_linear, QuantisedLinear)
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(own(x), theirs(x), atol=1e-4, rtol=1e-4)


def test_matrices_of_jamba_stay_quantised_but_one_that_its_code_reads(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, draw_model(CONFIGS["jamba"]()), mixed)
    model: Any = load_model(str(path)).model
    linears = {n for n, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert linears == {f"model.layers.{layer}.mamba.dt_proj" for layer in (0, 2, 3)}
    assert not any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("heads", [[2, 0, 2, 2], [0, 2, 2, 0]])
def test_layers_that_attend_lie_equally_far_apart_in_jamba(
    heads: list[int], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match="known: heads in layers that lie equally far"):
        read_with(tmp_path / "model.gguf", "jamba", **{KV_HEADS: heads})


@pytest.mark.parametrize("layer", [1, 3])
def test_so_do_layers_with_experts(layer: int, tmp_path: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        name = f"blk.{layer}.ffn_gate_inp.weight"
        tensors[name.replace(str(layer), "2")] = tensors.pop(name)

    path = write_changed(tmp_path / "model.gguf", "jamba", change)
    with pytest.raises(UnsupportedModelError, match="known: experts in layers that lie equally"):
        load_gguf_config(path)


def test_the_correction_by_which_experts_are_chosen(tmp_path: Path) -> None:
    path, model = tmp_path / "model.gguf", draw_model(CONFIGS["lfm2moe"]())
    prompts = random_prompts((40,))
    before = expected(model, prompts)
    model.model.layers[1].feed_forward.expert_bias.copy_(torch.linspace(-1, 1, 6))
    written = write_gguf(path, model, same(Type.F32))
    assert expected(written, prompts) != before
    assert generate(path, prompts) == expected(written, prompts)


@pytest.mark.parametrize(
    ("heads", "known"),
    [
        ([0, 2, 0], "a number, or one for each of 2 layers"),
        ([0, -2], "a number, or one for each of 2 layers"),
        ([1, 2], "one number for all layers that attend, and at least one of them"),
        ([0, 0], "one number for all layers that attend, and at least one of them"),
        ([0, 3], "only divisors of the head_count, 4"),
    ],
)
def test_heads_of_layers_that_cannot_be_are_refused(
    heads: list[int], known: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{KV_HEADS} = .*; known: {known}"):
        read_with(tmp_path / "model.gguf", "lfm2", **{KV_HEADS: heads})


@pytest.mark.parametrize(
    ("name", "key", "value", "known"),
    [
        ("lfm2", "attention.head_count", 8, "only heads of 64 that make up 256 rows of queries"),
        ("lfm2", "attention.value_length", 32, "only the width of keys, 64"),
        ("lfm2", "rope.dimension_count", 32, "only the width of keys, 64"),
        ("lfm2", "shortconv.l_cache", 0, "whole numbers from 1 on"),
        ("falcon-h1", "block_count", 2**31, "only the number of blocks that have tensors, 2"),
        ("lfm2moe", "expert_gating_func", 1, "only 2, sigmoid"),
        ("granitehybrid", "ssm.inner_size", 640, "only multiples of the embedding_length, 256"),
        ("granitehybrid", "ssm.time_step_rank", 7, "only divisors of the ssm.inner_size, 512"),
        ("granitehybrid", SHARED, 256, "only the feed_forward_length, 512"),
        ("granite", SHARED, 256, "only the feed_forward_length, 512"),
    ],
)
def test_values_that_are_not_known_are_refused(
    name: str, key: str, value: int, known: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{key} = {value}; known: {known}"):
        read_with(tmp_path / "model.gguf", name, **{key: value})


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("lfm2moe", "shortconv.l_cache"),
        ("lfm2moe", "expert_gating_func"),
        ("granitehybrid", "ssm.group_count"),
        ("granitehybrid with experts", SHARED),
    ],
)
def test_values_that_lack_are_named(name: str, key: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"has no \w+\.{key}"):
        read_with(tmp_path / "model.gguf", name, **{key: None})


@pytest.mark.parametrize(
    ("widths", "known"),
    [
        ([0, 512, 0], "one for each of 4 layers, 0 or the width of all MLPs"),
        ([0, 0, 0, 0], "one for each of 4 layers, 0 or the width of all MLPs"),
        ([0, 512, 0, 256], "one for each of 4 layers, 0 or the width of all MLPs"),
        ([0, -512, 0, 0], "one for each of 4 layers, 0 or the width of all MLPs"),
        ([0, 0, 512, 0], "0 in layers that attend"),
    ],
)
def test_widths_of_layers_that_cannot_be_are_refused(
    widths: list[int], known: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(UnsupportedModelError, match=rf"feed_forward_length = .*; known: {known}"):
        read_with(path, "nemotron_h", feed_forward_length=widths)


@pytest.mark.parametrize("name", NEMOTRON_3)
def test_experts_without_gates_stay_quantised(name: str, tmp_path: Path) -> None:
    path, config = tmp_path / "model.gguf", CONFIGS[name]()
    write_gguf(path, draw_model(config), same(Type.Q8_0))
    model: Any = load_model(str(path)).model
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    width = config.moe_latent_size or config.hidden_size
    numbers = 2 * config.n_routed_experts * config.moe_intermediate_size * width
    assert [module.nbytes * 16 for module in experts] == [numbers * 17] * 2
    gate = model.model.layers[1].mixer.gate
    assert gate.e_score_correction_bias.dtype == torch.float32


@pytest.mark.parametrize("types", [same(Type.F32), same(Type.Q4_0), mixed])
@pytest.mark.parametrize("name", NEMOTRON_3)
def test_a_correction_that_chooses_other_experts(name: str, types: Any, tmp_path: Path) -> None:
    path, model = tmp_path / "model.gguf", draw_model(CONFIGS[name]())
    for layer in (1, 3):
        correction = model.model.layers[layer].mixer.gate.e_score_correction_bias
        correction.copy_(torch.linspace(-1, 1, len(correction)))
    written = write_gguf(path, model, types)
    prompts = random_prompts((5, 40))
    assert generate(path, prompts) == expected(written, prompts)


def test_a_block_of_nemotron_that_predicts_more_tokens_is_left_out(tmp_path: Path) -> None:
    """It attends and has experts, and so it stands in lists of layers."""
    path, model = tmp_path / "model.gguf", draw_model(CONFIGS["nemotron_h_moe"]())
    with writing(path, model, same(Type.F32)) as (writer, written):
        replace_key(writer, "block_count", 6)
        replace_key(writer, "nextn_predict_layers", 1)
        replace_key(writer, KV_HEADS, [0, 0, 2, 0, 0, 2])
        replace_key(writer, "feed_forward_length", [0, 256, 0, 256, 0, 256])
        for part, shape in (("nextn.eh_proj", (256, 512)), ("ffn_up_exps", (8, 256, 256))):
            writer.add_tensor(f"blk.5.{part}.weight", torch.zeros(shape).numpy())
    assert load_gguf_config(str(path)).layers_block_type == model.config.layers_block_type
    prompts = random_prompts((5, 40))
    assert generate(path, prompts) == expected(written, prompts)


@pytest.mark.parametrize(
    ("key", "value", "known"),
    [
        ("expert_gating_func", 1, "only 2"),
        ("expert_group_count", 3, "only divisors of the expert_count, 8"),
        ("expert_group_used_count", 2, "at most the expert_group_count, 1"),
        ("expert_used_count", 9, "at most the expert_count, 8"),
        ("expert_feed_forward_length", 128, "only the feed_forward_length, 256"),
        ("expert_count", 0, "only models with experts"),
        ("feed_forward_length", [0, 256, 0, 64, 0], "one for each of 5 layers, 0 or the width"),
        ("feed_forward_length", [0, 256, 256, 0, 0], "0 in layers that attend"),
    ],
)
def test_experts_of_nemotron_that_cannot_be_are_refused(
    key: str, value: Any, known: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"{key} = .*; known: {known}"):
        read_with(tmp_path / "model.gguf", "nemotron_h_moe", **{key: value})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("expert_feed_forward_length", [128, 0, 64, 0, 0], "one for each layer of nemotron_h_moe"),
        ("expert_shared_feed_forward_length", 128, r"shared_experts\.up_proj\.weight is \[512,"),
        ("moe_latent_size", 128, r"lacks model\.layers\.1\.mixer\.fc1_latent_proj\.weight"),
    ],
)
def test_experts_of_nemotron_that_the_file_has_not_are_refused(
    key: str, value: Any, message: str, tmp_path: Path
) -> None:
    path, model = tmp_path / "model.gguf", draw_model(CONFIGS["nemotron_h_moe"]())
    with writing(path, model, same(Type.F32)) as (writer, _):
        replace_key(writer, key, value)
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(str(path))


@pytest.mark.parametrize(
    "key", ["attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"]
)
def test_the_epsilon_of_norms_by_either_name(key: str, tmp_path: Path) -> None:
    config = read_with(tmp_path / "model.gguf", "nemotron_h", **{key: 0.25})
    assert config.layer_norm_epsilon == 0.25


def test_a_file_that_says_of_no_layer_that_it_is_dense(tmp_path: Path) -> None:
    config = read_with(tmp_path / "model.gguf", "lfm2moe", leading_dense_block_count=None)
    assert config.num_dense_layers == 0


def test_what_granite_4_says_of_layers_that_it_has_not(tmp_path: Path) -> None:
    """The converter writes its dense models, in which all layers attend, as those before."""
    path, model = tmp_path / "model.gguf", draw_model(CONFIGS["granite"]())
    with writing(path, model, same(Type.F32)) as (writer, _):
        replace_key(writer, SHARED, 512)
        add_mamba2(writer, 512, 8, [4, 32, 1])
    assert load_gguf_config(str(path)).model_type == "granite"


@pytest.mark.parametrize("other", ["ffn_up", "ffn_gate"])
def test_halves_of_a_weight_that_have_other_types(other: str, tmp_path: Path) -> None:
    path, model = tmp_path / "model.gguf", draw_model(CONFIGS["granitehybrid"]())
    written = write_gguf(path, model, lambda name: Type.Q8_0 if other in name else Type.Q4_0)
    prompts = random_prompts((5, 40))
    assert generate(path, prompts) == expected(written, prompts)


def test_rows_of_a_joined_weight_are_those_of_its_parts(tmp_path: Path) -> None:
    path, model = tmp_path / "model.gguf", draw_model(CONFIGS["granitehybrid"]())
    write_gguf(path, model, same(Type.Q8_0))
    checkpoint = GgufCheckpoint(str(path))
    name = "model.layers.1.shared_mlp.input_linear.weight"
    whole = checkpoint.read_quantised(name)
    for some in (slice(0, 100), slice(500, 520), slice(512, 1024), slice(0, 1024)):
        numbers = checkpoint.read(name)[some]
        assert torch.equal(whole[some].dequantised(), numbers)
    assert torch.equal(numbers[:512], checkpoint.read(name)[:512])


def write_changed(path: Path, name: str, change: Callable[[dict[str, Any]], None]) -> str:
    """change: what it does to the tensors by their names."""
    model = draw_model(CONFIGS[name]())
    with writing(path, model, same(Type.F32)) as (writer, _):
        change(writer.tensors[0])
    return str(path)


def test_decays_that_grow_are_refused(tmp_path: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors["blk.0.ssm_a"].tensor = -tensors["blk.0.ssm_a"].tensor

    path = write_changed(tmp_path / "model.gguf", "granitehybrid", change)
    with pytest.raises(UnsupportedModelError, match=r"layers\.0\.mamba\.A_log .* above 0"):
        load_model(path)


@pytest.mark.parametrize(
    ("tensor", "lacking"),
    [
        ("blk.0.ffn_up.weight", r"0\.shared_mlp\.input_linear\.weight"),
        ("blk.0.ssm_a", r"0\.mamba\.A_log"),
        ("blk.0.ssm_dt.bias", r"0\.mamba\.dt_bias"),
        ("blk.0.ssm_norm.weight", r"0\.mamba\.norm\.weight"),
    ],
)
def test_a_tensor_that_lacks_is_refused_by_name(tensor: str, lacking: str, tmp_path: Path) -> None:
    path = write_changed(tmp_path / "m.gguf", "granitehybrid", lambda all_: all_.pop(tensor))
    with pytest.raises(UnsupportedModelError, match=lacking):
        load_model(path)
