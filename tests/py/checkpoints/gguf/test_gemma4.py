"""Files of Gemma 4: layers of two kinds, which share keys and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")

from flexinfer.checkpoints.gguf.checkpoint import load_gguf_config
from flexinfer.errors import UnsupportedModelError
from flexinfer.layers.embedding import QuantisedEmbedding
from flexinfer.layers.experts import Experts
from flexinfer.layers.quantised_linear import QuantisedLinear
from flexinfer.models.loading import load_model
from helpers.gguf.answers import expected
from helpers.gguf.files import Type, write_gguf, writing
from helpers.gguf.form import Form, Parts
from helpers.gguf.forms import FORMS
from helpers.gguf.models import CONFIGS, mixed, same
from helpers.gguf.parts import experts
from helpers.gguf.reading import read_with
from helpers.mixtures import generate
from helpers.tiny_models import draw_model, random_prompts

EMBEDDED = "gemma4 with embeddings of each layer"
MIXTURE = "gemma4 with experts"
WINDOWED, FULL = "sliding_attention", "full_attention"


def draw(name: str = "gemma4", **settings: Any) -> Any:
    """With norms and scales of layers that differ from one another."""
    model = draw_model(CONFIGS[name](**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for layer in model.model.layers:
            layer.layer_scalar.uniform_(0.5, 1.5)
    return model


def mixed_if_wide(name: str) -> Type:
    """Rows of 64 numbers are no blocks of 256."""
    return Type.Q8_0 if name.endswith(".proj.weight") else mixed(name)


@pytest.mark.parametrize("types", [same(Type.F32), mixed_if_wide])
@pytest.mark.parametrize("name", ["gemma4", EMBEDDED, MIXTURE])
def test_layers_are_the_ones_of_the_model(name: str, types: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    written = write_gguf(path, draw(name, tie_word_embeddings=False), types)
    prompts = random_prompts((5, 40))
    assert generate(path, prompts) == expected(written, prompts)


def test_matrices_and_embeddings_of_each_layer_stay_quantised(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, draw(EMBEDDED), same(Type.Q8_0))
    model: Any = load_model(str(path)).model
    assert isinstance(model.model.embed_tokens_per_layer, QuantisedEmbedding)
    assert not [name for name, parameter in model.named_parameters() if parameter.dim() > 1]


def test_experts_stay_quantised_and_what_chooses_them_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    routers = ("ffn_gate_inp.weight", "ffn_gate_inp.scale")
    model = draw(MIXTURE)
    write_gguf(path, model, lambda name: Type.F32 if name.endswith(routers) else Type.Q8_0)
    read: Any = load_model(str(path), dtype=torch.float32).model
    for layer, written in zip(read.model.layers, model.model.layers, strict=True):
        assert isinstance(layer.experts, Experts)
        assert layer.experts.nbytes * 16 == 6 * 3 * 256 * 256 * 17
        router = layer.router
        assert torch.equal(router.scale, written.router.scale)
        assert torch.equal(router.per_expert_scale, written.router.per_expert_scale)
        assert not isinstance(router.proj, QuantisedLinear)


def test_gates_and_factors_of_all_experts_may_be_tensors_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As llama.cpp reads them, too."""
    path, model = tmp_path / "model.gguf", draw(MIXTURE, tie_word_embeddings=False)
    form = FORMS["gemma4_text"]

    def apart(name: str, tensor: Any, config: Any) -> Parts | None:
        return experts(name, tensor, config) or form.parts(name, tensor, config)

    monkeypatch.setitem(FORMS, "gemma4_text", Form("gemma4", form.add_keys, apart))
    written = write_gguf(path, model, same(Type.Q8_0))
    prompts = random_prompts((5, 40))
    assert generate(path, prompts) == expected(written, prompts)


@pytest.mark.parametrize("name", ["gemma4", EMBEDDED, MIXTURE])
def test_the_config_is_read(name: str, tmp_path: Path) -> None:
    path, model = tmp_path / "model.gguf", draw(name)
    write_gguf(path, model, same(Type.F32))
    found, wanted = load_gguf_config(str(path)).to_dict(), model.config.to_dict()
    others = {"dtype", "initializer_range", "architectures", "transformers_version", "rms_norm_eps"}
    if name != EMBEDDED:  # there is no such embedding
        others.add("vocab_size_per_layer_input")
    assert found["rms_norm_eps"] == pytest.approx(wanted["rms_norm_eps"])
    assert {k: v for k, v in found.items() if k not in others} == {
        k: v for k, v in wanted.items() if k not in others
    }


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention__head_count_kv", [2, 1, 2, 1], "one number for layers with a window"),
        ("attention__head_count_kv", [2, 2, 1], "one number for layers with a window"),
        ("attention__shared_kv_layers", 4, "less than the block_count, 4"),
        ("attention__sliding_window_pattern", [False, True, True, True], "last layer has no wind"),
        ("attention__value_length_swa", 32, "the width of keys, 64"),
        ("rope__dimension_count", 32, "the width of keys, 128"),
        ("feed_forward_length", [512, 512, 512, 1024], "one width, or twice that"),
        ("rope__scaling__type", "yarn", "rope.scaling"),
        ("expert_count", 8, r"no gemma4\.expert_used_count"),
    ],
)
def test_layers_that_the_model_cannot_have_are_refused(
    key: str, value: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_with(tmp_path / "model.gguf", "gemma4", **{key: value})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("expert_used_count", 7, "at most the expert_count, 6"),
        ("expert_count", 5, r"only the experts of blk\.0\.ffn_.*_exps\.weight, 6"),
        ("expert_feed_forward_length", None, "has no gemma4.expert_feed_forward_length"),
    ],
)
def test_experts_that_the_model_cannot_have_are_refused(
    key: str, value: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_with(tmp_path / "model.gguf", MIXTURE, **{key: value})


def test_experts_of_another_width_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    read_with(path, MIXTURE, expert_feed_forward_length=128)
    with pytest.raises(UnsupportedModelError, match=r"gate_proj\.weight is \[256, 256\].*\[128,"):
        load_model(str(path))


def test_layers_that_share_keys_and_values_may_have_them_in_the_file(tmp_path: Path) -> None:
    """As published models do: they are read nowhere."""
    path, model = tmp_path / "model.gguf", draw(EMBEDDED)
    with writing(path, model, same(Type.F32)) as (writer, _):
        writer.add_tensor("blk.3.attn_k.weight", np.zeros((128, 256), np.float32))
    assert load_model(str(path)).model.config.num_kv_shared_layers == 2


def test_frequencies_that_are_divided_otherwise_are_refused(tmp_path: Path) -> None:
    path, model = tmp_path / "model.gguf", draw()
    with writing(path, model, same(Type.F32)) as (writer, _):
        writer.tensors[0]["rope_freqs.weight"].tensor[:] = 2
    with pytest.raises(UnsupportedModelError, match="factors of frequencies"):
        load_gguf_config(str(path))


def test_values_in_some_layers_alone_are_refused(tmp_path: Path) -> None:
    """Layers without a window that take keys for values all do."""
    path = tmp_path / "model.gguf"
    model = draw(layer_types=[WINDOWED, FULL, WINDOWED, FULL])
    with writing(path, model, same(Type.F32)) as (writer, _):
        writer.add_tensor("blk.1.attn_v.weight", np.zeros((128, 256), np.float32))
    with pytest.raises(UnsupportedModelError, match="values in all layers, or in none"):
        load_gguf_config(str(path))
