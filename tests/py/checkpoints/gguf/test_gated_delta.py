"""Files of Qwen3-Next and Qwen3.5: delta nets, whose heads lie otherwise than in the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")

from flexinfer.checkpoints.gguf.blocks import DECODERS, decode
from flexinfer.checkpoints.gguf.checkpoint import load_gguf_config
from flexinfer.errors import UnsupportedModelError
from flexinfer.layers.quantised_linear import QuantisedLinear
from flexinfer.models.loading import load_model
from helpers.gguf.answers import expected
from helpers.gguf.files import Type, add_weights, finish, quantise, write_gguf, writer_of, writing
from helpers.gguf.form import Form, Parts
from helpers.gguf.forms import FORMS
from helpers.gguf.models import CONFIGS, mixed, same
from helpers.gguf.reading import read_with
from helpers.mixtures import generate
from helpers.tiny_models import draw_model, random_prompts

NAMES = ("qwen3next", "qwen35", "qwen35moe")


def draw(name: str, **settings: Any) -> Any:
    """With norms, decays and biases that differ from one another."""
    model = draw_model(CONFIGS[name](**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def unlike(name: str) -> Type:
    """Queries, keys and values of another type than their gates, with groups of another size."""
    return Type.Q6_K if "attn_qkv" in name else Type.Q4_K


def with_minimums(name: str) -> Type:
    return Type.Q5_K if "attn_qkv" in name else Type.Q4_K


@pytest.mark.parametrize("types", [same(Type.F32), same(Type.Q4_0), mixed, unlike, with_minimums])
@pytest.mark.parametrize("name", NAMES)
def test_heads_are_where_the_model_has_them(name: str, types: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    written = write_gguf(path, draw(name), types)
    prompts = random_prompts((5, 70))
    assert generate(path, prompts) == expected(written, prompts)


@pytest.mark.parametrize("name", NAMES)
def test_matrices_of_delta_nets_stay_quantised(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, draw(name), with_minimums)
    model: Any = load_model(str(path)).model
    plain = {n.split(".", 3)[-1] for n, p in model.named_parameters() if p.dim() > 1}
    assert plain <= {"linear_attn.conv1d.weight", "mlp.gate.weight"}
    net = model.model.layers[0].linear_attn
    quantised = {n for n, part in net.named_children() if isinstance(part, QuantisedLinear)}
    inputs = ("qkvz", "ba") if name == "qwen3next" else ("qkv", "z", "b", "a")
    assert quantised == {"out_proj", *(f"in_proj_{each}" for each in inputs)}
    if name == "qwen3next":  # of 5 bits and 4, both with minimums
        assert net.in_proj_qkvz.nbytes * 8 / net.in_proj_qkvz.out_features / 256 == 6.625
        assert net.out_proj.nbytes * 8 / 256 / 512 == 4.625


def test_inputs_that_the_file_has_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first files of Qwen3-Next have them."""

    def joined(name: str, tensor: torch.Tensor, config: Any) -> Parts | None:
        if not name.endswith("in_proj_qkvz.weight"):
            return form.parts(name, tensor, config)
        return {f"blk.{name.split('.')[2]}.ssm_in.weight": tensor}

    form = FORMS["qwen3_next"]
    monkeypatch.setitem(FORMS, "qwen3_next", Form("qwen3next", form.add_keys, joined))
    path = tmp_path / "model.gguf"
    written, prompts = write_gguf(path, draw("qwen3next"), same(Type.Q8_0)), random_prompts((20,))
    assert generate(path, prompts) == expected(written, prompts)


@pytest.mark.parametrize("name", NAMES)
def test_inputs_of_8_bits(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, draw(name), unlike)
    ids = torch.arange(20)[None]
    logits = []
    for quantization in ("auto", "a8"):
        model = load_model(str(path), dtype="float32", quantization=quantization).model
        with torch.no_grad():
            logits.append(model(ids, use_cache=False).logits.flatten())
    assert not torch.equal(*logits)
    assert torch.corrcoef(torch.stack(logits))[0, 1] > 0.9


def write_with_layers_behind(path: Path, name: str, count: int, said: int) -> Any:
    """A file with a layer that predicts a token beyond the next, as some have it."""
    model = draw(name)
    model.config.num_hidden_layers += count
    writer = writer_of(path, model)
    model.config.num_hidden_layers -= count
    if said:
        writer.add_nextn_predict_layers(said)
    writer.add_tensor("blk.4.nextn.eh_proj.weight", np.zeros((256, 512), np.float32))
    writer.add_tensor("blk.4.attn_q.weight", np.zeros((512, 256), np.float32))
    written = add_weights(writer, model, same(Type.Q8_0))
    finish(writer)
    return written


@pytest.mark.parametrize("name", NAMES)
def test_layers_that_predict_tokens_beyond_the_next_are_left_out(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    written = write_with_layers_behind(path, name, 1, 1)
    prompts = random_prompts((20,))
    assert generate(path, prompts) == expected(written, prompts)


def test_such_layers_that_the_file_does_not_announce_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_with_layers_behind(path, "qwen35", 0, 0)
    with pytest.raises(UnsupportedModelError, match=r"block_count = 4; known: only .* 5$"):
        load_gguf_config(str(path))
    write_with_layers_behind(path, "qwen35", 1, 5)
    with pytest.raises(UnsupportedModelError, match=r"nextn_predict_layers = 5; known: .* than"):
        load_gguf_config(str(path))


@pytest.mark.parametrize("kinds", ["lllf", "fllf", "llff"])
def test_layers_with_attention_are_those_that_the_file_names(kinds: str, tmp_path: Path) -> None:
    names = {"l": "linear_attention", "f": "full_attention"}
    kept = [names[kind] for kind in kinds]
    config = read_with(tmp_path / "model.gguf", "qwen35", {"layer_types": kept})
    assert config.layer_types == kept


def test_without_names_every_so_many_layers_have_attention(tmp_path: Path) -> None:
    kept = ["linear_attention", "full_attention"] * 2
    values = {"attention__recurrent_layers": None, "full_attention_interval": 2}
    config = read_with(tmp_path / "model.gguf", "qwen35", {"layer_types": kept}, **values)
    assert config.layer_types == kept


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("ssm__group_count", 3, "only divisors of ssm.time_step_rank, 8"),
        ("ssm__inner_size", 256, "heads of values as wide as those of keys, 512"),
        ("attention__recurrent_layers", [True, False], "one for each of 4 layers"),
        ("rope__dimension_count", 0, "whole numbers from 1 on"),
        ("rope__dimension_count", 2**31, "even numbers up to the width of keys, 64"),
    ],
)
def test_heads_that_cannot_be_are_refused(
    key: str, value: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_with(tmp_path / "model.gguf", "qwen35", **{key: value})


TERNARY = ("TQ2_0", "TQ1_0")
"""Types with a scale for all of a block."""


def blocks(kind: str, seed: int) -> Any:
    weight = np.random.default_rng(seed).standard_normal((16, 512), np.float32)
    return decode(kind, torch.from_numpy(quantise(weight, Type[kind], seed)))


@pytest.mark.parametrize("kind", [kind for kind in DECODERS if kind not in ("MXFP4", *TERNARY)])
@pytest.mark.parametrize("width", [64, 256])
def test_inputs_in_another_order_are_the_same_numbers(kind: str, width: int) -> None:
    tensor = blocks(kind, 0)
    order = torch.arange(512).view(-1, width).flip(0).flatten()
    moved = tensor.with_inputs_in_order(order)
    assert torch.equal(moved.dequantised(), tensor.dequantised()[:, order])
    assert len(moved.levels) == (len(tensor.levels) if width == 256 else 0)
    x = torch.randn(3, 512)
    layer = QuantisedLinear(moved, None, torch.float32)
    torch.testing.assert_close(layer(x).double(), moved.reference(x), rtol=1e-4, atol=1e-4)


def test_groups_of_inputs_are_not_torn() -> None:
    with pytest.raises(ValueError, match="share a scale with 31 others"):
        blocks("Q8_0", 0).with_inputs_in_order(torch.arange(512).flip(0))
    for kind in TERNARY:
        with pytest.raises(ValueError, match="share a scale with 255 others"):
            blocks(kind, 0).with_inputs_in_order(torch.arange(512).view(4, 128).flip(0).flatten())


KINDS = (
    *("Q8_0", "Q6_K", "Q5_K", "Q5_1", "Q4_K", "Q4_0", "Q3_K", "Q2_K", "IQ4_NL", "IQ4_XS"),
    *("IQ3_S", "IQ3_XXS", "IQ2_XS", "IQ1_S", "TQ2_0"),
)


@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", KINDS)
def test_rows_of_unlike_types_in_one_weight(first: str, second: str) -> None:
    tensors = [blocks(first, 0), blocks(second, 1)]
    kinds = [tensor.kind for tensor in tensors]
    same_form = [tensor.as_one_of(kinds) for tensor in tensors]
    joined = type(tensors[0]).join(same_form)
    numbers = torch.cat([tensor.dequantised() for tensor in tensors])
    torch.testing.assert_close(joined.dequantised(), numbers, rtol=1e-6, atol=1e-6)
    x = torch.randn(3, 512)
    layer = QuantisedLinear(joined, None, torch.float32)
    torch.testing.assert_close(layer(x).double(), joined.reference(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "tensor", "numbers", "message"),
    [
        ("qwen3next", "attn_qkv.weight", np.zeros((767, 256)), "in 2 parts, [767, 256] and [512"),
        ("qwen3next", "attn_gate.weight", np.zeros((1, 256)), "[768, 256] and [1, 256]; there"),
        ("qwen35", "ssm_a", np.full(8, 0.5), "decays above 0"),
    ],
)
def test_weights_that_no_delta_net_has_are_refused(
    name: str, tensor: str, numbers: Any, message: str, tmp_path: Path
) -> None:
    """Rows of joined inputs were not counted: reading those that are missing raised; decays above 0
    were NaN in the model."""
    path, model = tmp_path / "model.gguf", draw(name)
    with writing(path, model, same(Type.F32)) as (writer, _):
        writer.tensors[0].pop(f"blk.0.{tensor}")
        writer.add_tensor(f"blk.0.{tensor}", numbers.astype(np.float32))
    with pytest.raises(UnsupportedModelError) as refusal:
        load_model(str(path))
    assert message in str(refusal.value)
