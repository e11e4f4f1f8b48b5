"""Files of Gemma 3n: several states of each token, of which one is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")

from flexinfer.checkpoints.gguf.checkpoint import load_gguf_config
from flexinfer.errors import UnsupportedModelError
from flexinfer.models.loading import load_model
from helpers.gguf.files import Type, write_gguf
from helpers.gguf.models import CONFIGS, same
from helpers.gguf.reading import read_with
from helpers.tiny_models import draw_model


def draw(**settings: Any) -> Any:
    """With states that differ from one another."""
    model = draw_model(CONFIGS["gemma3n"](**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or "altup" in name:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def test_logits_are_those_of_the_model(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    written = write_gguf(path, draw(tie_word_embeddings=False), same(Type.Q8_0)).eval()
    ids = torch.arange(40)[None] * 7 % 128
    with torch.no_grad():
        wanted = written(ids, use_cache=False).logits
        found = load_model(str(path), dtype="float32").model(ids, use_cache=False).logits
    assert (found - wanted).abs().max() < 1e-4 * wanted.std()


def test_large_matrices_stay_quantised(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, draw(), same(Type.Q8_0))
    model: Any = load_model(str(path)).model
    assert not [name for name, parameter in model.named_parameters() if parameter.dim() > 1]
    assert model.model.layers[0].mlp.down_proj.nbytes * 8 / 512 / 256 == 8.5


def test_the_config_is_read(tmp_path: Path) -> None:
    path, model = tmp_path / "model.gguf", draw(altup_active_idx=1)
    write_gguf(path, model, same(Type.F32))
    found, wanted = load_gguf_config(str(path)).to_dict(), model.config.to_dict()
    others = {"dtype", "initializer_range", "architectures", "transformers_version", "rms_norm_eps"}
    assert found["rms_norm_eps"] == pytest.approx(wanted["rms_norm_eps"])
    assert {k: v for k, v in found.items() if k not in others} == {
        k: v for k, v in wanted.items() if k not in others
    }


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("altup__active_idx", 4, "less than altup.num_inputs, 4"),
        ("attention__shared_kv_layers", 4, "less than the block_count, 4"),
        ("activation_sparsity_scale", [1.0, 1.0], "a number for each of 4 layers"),
        ("activation_sparsity_scale", [float("nan")] * 4, "a number for each of 4 layers"),
        ("feed_forward_length", [512, 512, 512, 1024], "one for each layer"),
    ],
)
def test_what_the_model_cannot_have_is_refused(
    key: str, value: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_with(tmp_path / "model.gguf", "gemma3n", **{key: value})
