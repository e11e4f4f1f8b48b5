"""Which models the engine takes, and that it refuses the others with the reason."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import transformers as tf
from safetensors.torch import load_file, save_file
from transformers.models.gemma3.modeling_gemma3 import Gemma3Attention
from transformers.models.llama.modeling_llama import LlamaAttention

from flexinfer import LLM, UnsupportedModelError
from flexinfer.attention.hook import attention_forward, probe_forward, register
from flexinfer.config import EngineConfig
from flexinfer.memory.kv_groups import kv_spec
from flexinfer.models.checks import check_config, max_positions
from flexinfer.models.dtypes import weights_dtype
from flexinfer.models.loading import load_model
from flexinfer.models.probe import probe
from helpers.tiny_models import CONFIGS, draw_model, make_model

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_geometry_is_what_the_layers_really_use(name: str) -> None:
    model = make_model(name)
    loaded = load_model(model)
    config = model.config
    num_kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or 16
    assert len(loaded.layers) == config.num_hidden_layers
    for i, layer in enumerate(loaded.layers):
        assert (layer.owner, layer.num_kv_heads, layer.key_dim) == (i, num_kv_heads, head_dim)
    assert loaded.dtype is torch.float32
    assert max_positions(config) == config.max_position_embeddings


def test_probe_sees_windows_and_soft_caps_of_each_layer() -> None:
    options = [call.options for call in probe(make_model("gemma2")).values()]
    assert [o.sliding_window for o in options] == [16, None, 16, None]
    assert {o.softcap for o in options} == {5.0}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (lambda: tf.T5Config(), "encoder-decoder"),
        (lambda: tf.MambaConfig(hidden_size=32, num_hidden_layers=2), "a state and no KV"),
        (lambda: tf.RecurrentGemmaConfig(), "a state that is no KV cache"),
        (lambda: tf.BloomConfig(hidden_size=32, n_head=2, n_layer=2), "AttentionInterface"),
        (
            lambda: tf.LlamaConfig(
                **SMALL, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
            ),
            "dynamic rope",
        ),
        (lambda: tf.ViTConfig(), "no causal language model"),
        (lambda: tf.LlamaConfig(**SMALL | {"num_hidden_layers": 0}), "num_hidden_layers = 0"),
        (lambda: tf.LlamaConfig(**SMALL, rms_norm_eps=-1e-5), "rms_norm_eps = -1e-05"),
        (lambda: tf.LlamaConfig(**SMALL, rms_norm_eps=float("nan")), "rms_norm_eps = nan"),
        (lambda: tf.PhiConfig(**SMALL, layer_norm_eps=-1.0), "layer_norm_eps = -1"),
        (lambda: tf.LlamaConfig(**SMALL, recurrent_kv_cache_mode="last_loop"), "last_loop"),  # Dory
    ],
)
def test_architecture_is_refused_with_the_reason(config: Any, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        check_config(config())


def test_attention_in_both_directions_is_refused() -> None:
    small = {k: v for k, v in SMALL.items() if k != "max_position_embeddings"}
    model = tf.AutoModelForCausalLM.from_config(tf.BertConfig(**small))
    with pytest.raises(UnsupportedModelError, match="both directions"):
        load_model(model)


@pytest.mark.parametrize("wide_layers", [[1], [0, 1, 2, 3]])
def test_values_wider_than_keys_are_kept_as_they_are(
    monkeypatch: pytest.MonkeyPatch, wide_layers: list[int]
) -> None:
    attend = LlamaAttention.forward

    def wide(self: Any, hidden_states: Any, **kwargs: Any) -> Any:
        if self.layer_idx not in wide_layers:
            return attend(self, hidden_states, **kwargs)
        heads = torch.zeros(1, 4, hidden_states.shape[1], 32)
        values = torch.zeros_like(heads)
        probe_forward(self, heads[..., :16], heads[:, :2, :, :16], values[:, :2], None)
        return hidden_states, None

    monkeypatch.setattr(LlamaAttention, "forward", wide)
    loaded = load_model(make_model("llama"))
    widths = [(layer.key_dim, layer.value_dim) for layer in loaded.layers]
    assert widths == [(16, 32 if i in wide_layers else 16) for i in range(4)]
    spec = kv_spec(loaded, 64, None)
    assert spec.bytes_per_token == sum(4 * 2 * (k + v) for k, v in widths)
    assert sorted(layer for group in spec.groups for layer in group.layers) == [0, 1, 2, 3]


def test_layers_without_attention_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They keep something that is no KV."""
    attend = LlamaAttention.forward

    def skip(self: Any, hidden_states: Any, **kwargs: Any) -> Any:
        if self.layer_idx == 2:
            return hidden_states, None
        return attend(self, hidden_states, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", skip)
    with pytest.raises(UnsupportedModelError, match="4 layers, of which 3 use attention"):
        load_model(make_model("llama"))


def test_attention_arguments_that_no_backend_knows_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attend = LlamaAttention.forward

    def biased(self: Any, hidden_states: Any, **kwargs: Any) -> Any:
        return attend(self, hidden_states, **{**kwargs, "position_bias": torch.zeros(1)})

    monkeypatch.setattr(LlamaAttention, "forward", biased)
    with pytest.raises(UnsupportedModelError, match="passes 'position_bias' to attention"):
        load_model(make_model("llama"))


def test_a_window_that_only_one_of_several_masks_knows_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attend = Gemma3Attention.forward

    def forgetful(self: Any, *args: Any, **kwargs: Any) -> Any:
        sliding_window, self.sliding_window = self.sliding_window, None
        try:
            return attend(self, *args, **kwargs)
        finally:
            self.sliding_window = sliding_window

    monkeypatch.setattr(Gemma3Attention, "forward", forgetful)
    kinds = ["sliding_attention", "full_attention"]
    config = tf.Gemma3TextConfig(**SMALL, head_dim=16, sliding_window=16, layer_types=kinds)
    with pytest.raises(UnsupportedModelError, match="sliding window of 16 tokens without"):
        probe(from_config(config))


def test_a_window_that_hides_nothing_is_taken() -> None:
    """Phi-3.5-MoE masks a window as long as its longest sequence, and tells its layers of none."""
    config = tf.PhimoeConfig(
        **SMALL, sliding_window=64, num_local_experts=2, num_key_value_heads=2, pad_token_id=0
    )
    assert {call.window for call in probe(from_config(config)).values()} == {None}


def test_a_window_of_the_only_mask_is_that_of_all_layers() -> None:
    config = tf.PhimoeConfig(
        **SMALL, sliding_window=63, num_local_experts=2, num_key_value_heads=2, pad_token_id=0
    )
    assert {call.window for call in probe(from_config(config)).values()} == {63}


def test_a_window_that_no_layer_has_is_taken() -> None:
    """Qwen2-MoE makes the mask of its sliding layers, of which there are none: 0 tokens wide."""
    config = tf.Qwen2MoeConfig(
        **SMALL,
        num_key_value_heads=2,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )
    assert config.sliding_window == 0
    assert {call.window for call in probe(from_config(config)).values()} == {None}


def from_config(config: Any) -> Any:
    return tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def test_outside_of_the_engine_the_hook_says_so() -> None:
    heads, layer = torch.zeros(1, 2, 3, 16), torch.nn.Identity()
    layer.layer_idx = 0  # type: ignore[assignment]
    register()
    with pytest.raises(RuntimeError, match="outside of its engine"):
        attention_forward(layer, heads, heads, heads, None)
    with pytest.raises(RuntimeError, match="outside of the probe"):
        probe_forward(layer, heads, heads, heads, None)


def test_longrope_is_bounded_by_its_original_length() -> None:
    config = tf.Phi3Config(
        **SMALL,
        pad_token_id=0,
        original_max_position_embeddings=32,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
        },
    )
    assert max_positions(config) == 32


def test_unknown_folder_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'/no/such/model' does not exist"):
        load_model("/no/such/model")


def test_unknown_hub_id_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="-org/no-such-model' cannot be loaded"):
        load_model("no-such-org/no-such-model")


@pytest.mark.parametrize(
    ("denied", "is_file"),
    [
        ("model.safetensors", False),
        ("generation_config.json", False),
        ("", False),
        ("model.gguf", True),
    ],
)
def test_what_this_user_may_not_read_is_no_missing_file(
    denied: str, is_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("config.json", "model.safetensors", "generation_config.json", "model.gguf"):
        (tmp_path / name).write_text("{}")
    path = str(tmp_path / denied).rstrip("/")

    def refusing(real: Any) -> Any:
        def call(asked: Any, *arguments: Any) -> Any:
            if os.fspath(asked) == path:
                raise PermissionError(errno.EACCES, "Permission denied", path)
            return real(asked, *arguments)

        return call

    monkeypatch.setattr(os, "scandir", refusing(os.scandir))  # root may read everything
    monkeypatch.setattr("builtins.open", refusing(open))
    with pytest.raises(UnsupportedModelError, match=f"permission denied: .* read '{path}'"):
        load_model(path if is_file else tmp_path)


@pytest.mark.parametrize(("short", "dtype"), [("half", "float16"), ("float", "float32")])
def test_torchs_other_names_of_dtypes_are_known(short: str, dtype: str) -> None:
    config = EngineConfig("folder", dtype=short)
    assert weights_dtype(tf.LlamaConfig(), config.dtype, "cpu") is getattr(torch, dtype)


def test_a_folder_of_gguf_files_says_which_to_name(tmp_path: Path) -> None:
    (tmp_path / "tiny-Q8_0.gguf").write_bytes(b"GGUF")
    with pytest.raises(
        UnsupportedModelError, match=r"it has GGUF files: name one, as .*Q8_0\.gguf"
    ):
        load_model(str(tmp_path))


def test_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"has no config\.json"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_size": "many"},
        {"hidden_act": "unheard-of"},
        {"num_key_value_heads": 0},
        {"num_attention_heads": 0},
        {"quantization_config": 5},
        {"quantization_config": "gptq"},
        {"rope_parameters": "yarn"},
    ],
)
def test_a_config_with_values_of_other_types_is_refused(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    save_with(tmp_path, fields)
    with pytest.raises(UnsupportedModelError, match=r"config\.json has a value that"):
        load_model(tmp_path)


def test_weights_of_other_shapes_than_the_config_says_are_named(tmp_path: Path) -> None:
    save_with(tmp_path, {"num_key_value_heads": 4})
    with pytest.raises(
        UnsupportedModelError,
        match=r"layers\.0\.self_attn\.k_proj\.weight of \[32, 64\] where .*\[64, 64\], and 7 more",
    ):
        load_model(tmp_path)


def test_more_positions_than_there_are_addresses_are_refused() -> None:
    model = draw_model(CONFIGS["llama"]())
    model.config.max_position_embeddings = 1 << 40
    with pytest.raises(ValueError, match=r"addresses .* lower max_model_len or max_num_seqs"):
        LLM(model, skip_tokenizer_init=True, kv_cache_memory_bytes=64 << 20)


def save_with(folder: Path, fields: dict[str, Any]) -> None:
    """A model whose config.json says something else."""
    make_model("llama").save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))


def test_only_safetensors_are_read(tmp_path: Path) -> None:
    model = make_model("llama")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match="no safetensors"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        (["model.norm.weight"], r"lacks model\.norm\.weight, which a LlamaForCausalLM needs"),
        ([f"model.layers.{i}.mlp.up_proj.weight" for i in range(4)], "and 1 more"),
    ],
)
def test_a_checkpoint_that_lacks_weights_is_refused(
    tmp_path: Path, missing: list[str], named: str
) -> None:
    """transformers would draw them, and say so in a warning."""
    make_model("llama").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if name not in missing}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=named):
        load_model(tmp_path)


def test_a_checkpoint_without_the_copy_of_a_tied_weight_is_whole(tmp_path: Path) -> None:
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL, tie_word_embeddings=True))
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = load_model(tmp_path).model
    weight, embed = model.model.embed_tokens.weight, loaded.model.embed_tokens
    assert torch.equal(embed(torch.arange(len(weight))), weight)
    assert loaded.lm_head.weight.data_ptr() == embed.weight.data_ptr()


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="got Linear"):
        load_model(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(("saved", "loaded"), [("bfloat16", "bfloat16"), ("float32", "float32")])
def test_dtype_auto_is_that_of_the_weights(tmp_path: Path, saved: str, loaded: str) -> None:
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL)).to(getattr(torch, saved))
    model.save_pretrained(tmp_path)
    assert load_model(tmp_path).dtype is getattr(torch, loaded)


def test_float16_weights_are_computed_in_bfloat16_on_a_cpu_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU computes in float16")
    tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL)).half().save_pretrained(tmp_path)
    assert load_model(tmp_path).dtype is torch.bfloat16
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert any("bfloat16" in text and "dtype='float16'" in text for text in warnings)
    caplog.clear()
    assert load_model(tmp_path, "float16").dtype is torch.float16
    assert not any("bfloat16" in record.getMessage() for record in caplog.records)
