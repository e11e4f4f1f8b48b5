"""gpt-oss in GGUF files: what it has beside others; refusals by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")

from flexinfer.checkpoints.gguf.checkpoint import GgufCheckpoint, load_gguf_config
from flexinfer.checkpoints.gguf.header import read_header
from flexinfer.errors import UnsupportedModelError
from flexinfer.models.loading import load_model
from helpers.gguf.files import Type, write_gguf, writing
from helpers.gguf.models import CONFIGS, same
from helpers.mixtures import NUM_TOKENS, generate
from helpers.tiny_models import continue_prompt, draw_model, random_prompts


def experts_in(kind: Type, others: Type) -> Callable[[str], Type]:
    def type_of(name: str) -> Type:
        if "ffn_gate_inp" in name:
            return Type.F32
        return kind if "_exps" in name else others

    return type_of


FILES = {
    "as ggml.org publishes it": experts_in(Type.MXFP4, Type.Q8_0),
    "experts alone": experts_in(Type.MXFP4, Type.BF16),
    "as llama-quantize makes it": experts_in(Type.Q5_0, Type.Q8_0),
    "float16": same(Type.F16),
}


@pytest.mark.parametrize("types", FILES)
def test_greedy_tokens_are_those_of_the_numbers_in_the_file(types: str, tmp_path: Path) -> None:
    """40 tokens are more than the window."""
    path = tmp_path / "model.gguf"
    written = write_gguf(path, draw_model(CONFIGS["gpt-oss"]()), FILES[types])
    prompts = random_prompts((5, 40))
    expected = [continue_prompt(written, tuple(prompt), NUM_TOKENS) for prompt in prompts]
    assert generate(path, prompts) == expected


def test_biases_of_gates_and_factors_take_turns(tmp_path: Path) -> None:
    path, name = tmp_path / "model.gguf", "model.layers.1.mlp.experts.gate_up_proj_bias"
    model = draw_model(CONFIGS["gpt-oss"]())
    with torch.no_grad():
        model.get_parameter(name).normal_()
    write_gguf(path, model, same(Type.Q8_0))
    checkpoint = GgufCheckpoint(str(path))
    assert checkpoint.weights[name].shape == (4, 1024)
    assert torch.equal(checkpoint.read(name), model.get_parameter(name))


@pytest.mark.parametrize("kinds", [["sliding_attention"] * 2, ["full_attention"] * 2])
def test_windows_that_the_file_says_of_each_layer(kinds: list[str], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = draw_model(CONFIGS["gpt-oss"](layer_types=kinds))
    with writing(path, model, same(Type.F32)) as (writer, _):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    assert load_gguf_config(str(path)).layer_types == kinds


def write_changed(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """change: what it does to the tensors by their names."""
    model = draw_model(CONFIGS["gpt-oss"]())
    with writing(path, model, same(Type.F32)) as (writer, _):
        (tensors,) = writer.tensors
        change(tensors)


@pytest.mark.parametrize(
    ("name", "lacking"),
    [
        ("blk.1.ffn_up_exps.bias", r"1\.mlp\.experts\.gate_up_proj_bias in 1 halves"),
        ("blk.1.ffn_gate_exps.bias", r"1\.mlp\.experts\.gate_up_proj_bias in 1 halves"),
        ("blk.0.ffn_down_exps.bias", r"lacks model\.layers\.0\.mlp\.experts\.down_proj_bias"),
        ("blk.0.ffn_down_exps.weight", r"lacks model\.layers\.0\.mlp\.experts\.0\.down_proj"),
        ("blk.1.attn_sinks.weight", r"lacks model\.layers\.1\.self_attn\.sinks"),
        ("blk.1.ffn_gate_inp.bias", r"lacks model\.layers\.1\.mlp\.router\.bias"),
        ("blk.1.post_attention_norm.weight", r"lacks model\.layers\.1\.post_attention_layernorm"),
        ("blk.1.attn_k.bias", r"lacks model\.layers\.1\.self_attn\.k_proj\.bias"),
    ],
)
def test_a_tensor_that_lacks_is_refused_by_name(name: str, lacking: str, tmp_path: Path) -> None:
    write_changed(tmp_path / "model.gguf", lambda tensors: tensors.pop(name))
    with pytest.raises(UnsupportedModelError, match=lacking):
        load_model(str(tmp_path / "model.gguf"))


def reshaped(name: str, shape: tuple[int, ...]) -> Callable[[dict[str, Any]], None]:
    def change(tensors: dict[str, Any]) -> None:
        tensors[name].tensor = np.zeros(shape, np.float32)
        tensors[name].shape, tensors[name].nbytes = shape, 4 * int(np.prod(shape))

    return change


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("blk.1.ffn_up_exps.bias", (4, 256), r"gate_up_proj_bias in 2 halves .*\[4, 256\]"),
        ("blk.1.ffn_up_exps.bias", (2048,), r"gate_up_proj_bias in 2 halves .*\[2048\]"),
        ("blk.1.attn_sinks.weight", (8,), r"sinks is \[8\] in the checkpoint, and \[4\]"),
        ("blk.1.ffn_down_exps.bias", (4, 512), r"down_proj_bias is \[4, 512\]"),
    ],
)
def test_tensors_of_other_shapes_are_refused_by_name(
    name: str, shape: tuple[int, ...], message: str, tmp_path: Path
) -> None:
    write_changed(tmp_path / "model.gguf", reshaped(name, shape))
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(str(tmp_path / "model.gguf"))


def test_halves_that_both_have_another_number_of_experts_are_refused(tmp_path: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        for part in ("gate", "up"):
            reshaped(f"blk.1.ffn_{part}_exps.bias", (3, 512))(tensors)

    write_changed(tmp_path / "model.gguf", change)
    with pytest.raises(UnsupportedModelError, match=r"gate_up_proj_bias is \[3, 1024\]"):
        load_model(str(tmp_path / "model.gguf"))


def test_two_tensors_that_are_one_in_the_model_are_refused(tmp_path: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors["blk.1.ffn_norm.weight"] = copy.copy(tensors["blk.1.attn_norm.weight"])

    write_changed(tmp_path / "model.gguf", change)
    with pytest.raises(UnsupportedModelError, match=r"'blk\.1\.ffn_norm\.weight' beside another"):
        load_model(str(tmp_path / "model.gguf"))


def test_a_window_has_to_be_there(tmp_path: Path) -> None:
    path, model = tmp_path / "model.gguf", draw_model(CONFIGS["gpt-oss"]())
    with writing(path, model, same(Type.F32)) as (writer, _):
        del writer.kv_data[0]["gpt-oss.attention.sliding_window"]
    with pytest.raises(UnsupportedModelError, match=r"no gpt-oss\.attention\.sliding_window"):
        load_gguf_config(str(path))


@pytest.mark.parametrize(
    ("texts", "ends", "inner"),
    [
        (("<|end|>", "<|return|>", "<|call|>"), (6, 7), (5,)),
        (("<|return|>", "<|end|>", "<|call|>"), (5, 7), (6,)),
        (("<|end|>", "<|return|>"), (5, 6), ()),
        (("<|end|>",), (5,), ()),
        (("<|return|>", "<|call|>"), (5, 6), ()),
    ],
)
def test_a_message_of_harmony_does_not_end_an_answer(
    texts: tuple[str, ...], ends: tuple[int, ...], inner: tuple[int, ...], tmp_path: Path
) -> None:
    """Thoughts end by <|end|> there, and so do they where the file names it among the ends."""
    path, model = tmp_path / "model.gguf", draw_model(CONFIGS["gpt-oss"]())
    with writing(path, model, same(Type.F32)) as (writer, _):
        writer.add_token_list([*map(str, range(5)), *texts])
        writer.add_eos_token_id(ends[0])
        writer.add_eot_token_id(inner[0] if inner else ends[0])
    header = read_header(str(path))
    assert (header.end_ids, header.inner_ids) == (ends, inner)
    found = load_gguf_config(str(path)).eos_token_id
    assert (found if isinstance(found, list) else [found]) == list(ends)
