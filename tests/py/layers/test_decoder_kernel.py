"""A decoder layer in one call gives the bits of its parts called one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import transformers as tf

from flexinfer import LLM, SamplingParams, _kernels
from flexinfer.layers.decoder_kernel import MAX_ROWS
from flexinfer.layers.decoder_stack import find_decoder_stack
from flexinfer.layers.host_linear import supports
from flexinfer.layers.mlp import GatedMLP
from flexinfer.layers.one_call_layer import OneCallLayer
from helpers.gguf.files import Type, write_gguf
from helpers.gguf.models import CONFIGS as GGUF_CONFIGS
from helpers.gguf.models import mixed
from helpers.tiny_models import draw_model

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
CONFIGS: dict[str, Any] = {
    "llama": lambda: tf.LlamaConfig(**SIZES),
    "biases": lambda: tf.LlamaConfig(**SIZES, attention_bias=True),
    "gates in panels of their own": lambda: tf.LlamaConfig(
        **{**SIZES, "intermediate_size": 192}, mlp_bias=True
    ),
    "norms": lambda: tf.Qwen3Config(**SIZES),
    "window": lambda: tf.MistralConfig(**SIZES, sliding_window=16),
    "experts": lambda: tf.Qwen3MoeConfig(**SIZES, **EXPERTS, moe_intermediate_size=96),
    "experts beside others": lambda: tf.Qwen3MoeConfig(
        **SIZES, **EXPERTS, moe_intermediate_size=96, mlp_only_layers=[0]
    ),
    "mixtral": lambda: tf.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "gelu": lambda: tf.GemmaConfig(**SIZES),
    "norms behind, window": lambda: tf.Gemma3TextConfig(
        **SIZES, sliding_window=16, layer_types=["sliding_attention", "full_attention"]
    ),
    "norms behind, soft cap": lambda: tf.Gemma2Config(
        **SIZES, sliding_window=16, attn_logit_softcapping=5.0
    ),
    "sinks": lambda: tf.GptOssConfig(  # and a window in one of the layers
        **SIZES, num_local_experts=4, sliding_window=16, rope_scaling=None
    ),
}
PROMPTS = [list(range(3, 3 + length)) for length in (1, 7, 20, MAX_ROWS + 9, 33)]
PARAMS = SamplingParams(temperature=0, max_tokens=8, logprobs=3, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in CONFIGS}
    for name, folder in made.items():
        draw_model(CONFIGS[name]()).save_pretrained(folder)
    return made


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Layers and rows of each call."""
    seen: list[tuple[int, int]] = []
    forward = _kernels.forward_decoder_layers

    def counted(layers: Any, attention: Any, *others: Any) -> None:
        forward(layers, attention, *others)
        seen.append((len(layers), others[-2]))

    monkeypatch.setattr(_kernels, "forward_decoder_layers", counted)
    return seen


def load(folder: Path, **settings: Any) -> LLM:
    defaults = {
        "skip_tokenizer_init": True,
        "threads": 2,
        "kv_cache_memory_bytes": 1 << 20,
        "enable_prefix_caching": False,
    }
    return LLM(str(folder), **{**defaults, **settings})


def fused(llm: LLM) -> list[Any]:
    layers = llm.llm_engine.loaded.model.modules()
    return [layer for layer in layers if isinstance(layer, OneCallLayer)]


def answers(llm: LLM) -> list[Any]:
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    return [(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in outputs]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", ["int8", "int4", "auto"])
@pytest.mark.parametrize("name", CONFIGS)
def test_it_gives_the_bits_of_its_parts(
    folders: dict[str, Path], calls: list[tuple[int, int]], name: str, quantization: str, dtype: str
) -> None:
    with load(folders[name], quantization=quantization, dtype=dtype) as llm:
        layers = fused(llm)
        assert len(layers) == 2
        found = answers(llm)
        if quantization != "auto" or supports(torch.zeros(192, 64, dtype=getattr(torch, dtype))):
            are_one_call = find_decoder_stack(llm.llm_engine.loaded.model) is not None
            has_experts = any(not isinstance(layer.mlp, GatedMLP) for layer in layers)
            assert {count for count, _ in calls} == {2 if are_one_call and not has_experts else 1}
        assert all(num_rows <= MAX_ROWS for _, num_rows in calls)
        calls.clear()
        for layer in layers:
            layer.runs_parts = True
        assert answers(llm) == found
        assert not calls


@pytest.mark.parametrize("watches", [True, False], ids=["hook", "other forward"])
def test_a_layer_that_somebody_watches_is_called(
    folders: dict[str, Path], calls: list[tuple[int, int]], watches: bool
) -> None:
    with load(folders["llama"], quantization="int8") as llm:
        expected = answers(llm)
        assert {count for count, _ in calls} == {2}
        calls.clear()
        layer, seen = fused(llm)[1], []
        if watches:
            layer.register_forward_hook(lambda *_: seen.append(1))
        else:
            forward = layer.forward
            layer.forward = lambda *args, **others: (seen.append(1), forward(*args, **others))[1]
        assert answers(llm) == expected
        assert {count for count, _ in calls} == {1}
        assert len(seen) >= PARAMS.max_tokens


def test_layers_of_several_shapes_are_called_one_by_one(
    folders: dict[str, Path], calls: list[tuple[int, int]]
) -> None:
    with load(folders["llama"], quantization="int8") as llm:
        expected = answers(llm)
        calls.clear()
        kernel = fused(llm)[0]._kernel
        assert kernel is not None
        kernel.shape = (*kernel.shape[:2], torch.float64)
        assert answers(llm) == expected
        assert {count for count, _ in calls} == {1}


@pytest.mark.parametrize("part", ["self_attn.o_proj", "post_attention_layernorm"])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_hooks_of_parts_are_called_in_each_step(
    folders: dict[str, Path], calls: list[tuple[int, int]], name: str, part: str
) -> None:
    with load(folders[name], quantization="int8") as llm:
        before = answers(llm)
        layer = fused(llm)[0]
        calls.clear()
        rows: list[int] = []
        hook = layer.get_submodule(part).register_forward_hook(
            lambda _module, _given, output: rows.append(output.shape[-2])
        )
        answers(llm)
        assert min(rows) < MAX_ROWS
        num_steps = len(rows)
        few = [count for count in rows if count <= MAX_ROWS]
        assert calls == [(1, count) for count in few]  # the other layer's
        hook.remove()
        assert answers(llm) == before
        assert len(rows) == num_steps


def test_kv_of_bytes_goes_the_same_way(
    folders: dict[str, Path], calls: list[tuple[int, int]]
) -> None:
    with load(folders["llama"], quantization="int8", kv_cache_dtype="int8") as llm:
        found = answers(llm)
        assert calls
        for layer in fused(llm):
            layer.runs_parts = True
        assert answers(llm) == found


def mixed_everywhere(name: str) -> Type:
    """Queries, keys and values are three products, gates and factors two."""
    if "attn_output" in name:
        return Type.Q8_0
    return Type.Q4_K if "ffn_gate" in name or "attn_k" in name else Type.Q6_K


@pytest.mark.parametrize(
    ("name", "types"), [("llama with biases", mixed), ("qwen3", mixed_everywhere)]
)
def test_weights_of_several_formats_are_one_call_too(
    calls: list[tuple[int, int]], name: str, types: Callable[[str], Type], tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, draw_model(GGUF_CONFIGS[name]()), types)
    with load(path, dtype="bfloat16") as llm:
        found = answers(llm)
        assert calls
        for layer in fused(llm):
            layer.runs_parts = True
        assert answers(llm) == found


def test_other_activations_and_narrow_heads_run_in_parts(
    folders: dict[str, Path], calls: list[tuple[int, int]], tmp_path: Path
) -> None:
    config = tf.LlamaConfig(**{**SIZES, "head_dim": 16}, hidden_act="gelu")
    draw_model(config).save_pretrained(tmp_path)
    with load(tmp_path, quantization="int8") as llm:
        answers(llm)
    assert not calls


def test_a_layer_of_an_unknown_format_runs_in_parts(
    folders: dict[str, Path], calls: list[tuple[int, int]]
) -> None:
    with load(folders["llama"], quantization="int8") as llm:
        for layer in fused(llm):
            layer.mlp.down_proj.__class__ = type("Other", (type(layer.mlp.down_proj),), {})
        answers(llm)
    assert not calls
