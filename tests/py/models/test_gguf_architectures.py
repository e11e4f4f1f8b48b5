"""What a GGUF file says of its architecture becomes the config that transformers has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")

from flexinfer.checkpoints.gguf import load_gguf_config
from flexinfer.checkpoints.gguf_architectures import ARCHITECTURES
from flexinfer.errors import UnsupportedModelError
from helpers.gguf_files import ARCHITECTURES as WRITTEN
from helpers.gguf_files import Type, add_weights, finish, write_gguf, writer_of
from helpers.gguf_models import CONFIGS, same
from helpers.tiny_models import draw_model

SAID = (
    *("sliding_window", "layer_types", "no_rope_layers", "rope_parameters"),
    *("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
    *("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
)


@pytest.mark.parametrize("name", ["smollm3", "granite", "phi3 with a window", "gemma2", "gemma3"])
def test_what_only_some_have_is_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = draw_model(CONFIGS[name]())
    write_gguf(path, model, same(Type.F32))
    found = load_gguf_config(str(path))
    for key in SAID:
        expected = getattr(model.config, key, None)
        if isinstance(expected, float):
            expected = pytest.approx(expected)
        assert getattr(found, key, None) == expected, key


@pytest.mark.parametrize("window", [0, None])
def test_gemma_3_without_windows(window: int | None, tmp_path: Path) -> None:
    path, kinds = tmp_path / "model.gguf", ["full_attention"] * 7
    model = draw_model(CONFIGS["gemma3"](layer_types=kinds))
    writer = writer_of(path, model)
    del writer.kv_data[0]["gemma3.attention.sliding_window"]
    if window is not None:
        writer.add_sliding_window(window)
    add_weights(writer, model, same(Type.F32))
    finish(writer)
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

    for num_layers, expected in ((layers, 24), (layers - 1, 16)):
        values["block_count"] = num_layers
        settings = ARCHITECTURES[name].settings(Values())  # type: ignore[arg-type]
        assert settings["query_pre_attn_scalar"] == expected


def test_a_window_where_there_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(
        path, draw_model(CONFIGS["olmo2"]()), same(Type.F32), {"attention.sliding_window": 16.0}
    )
    with pytest.raises(UnsupportedModelError, match=r"olmo2\.attention\.sliding_window"):
        load_gguf_config(str(path))


def test_every_architecture_is_written_by_these_tests() -> None:
    assert set(WRITTEN.values()) == ARCHITECTURES.keys()
