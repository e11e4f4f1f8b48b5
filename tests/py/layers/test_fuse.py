"""Fused layers compute what the layers that they replace compute."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.llama4.modeling_llama4 import Llama4TextRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

from flexinfer import LLM, SamplingParams
from flexinfer.layers import fuse, mlp
from flexinfer.layers.formats import make_linear
from flexinfer.layers.fuse import fuse_layers
from flexinfer.layers.linear import Linear, WeightFormat
from flexinfer.layers.mlp import GatedMLP
from flexinfer.layers.norm import RMSNorm, fuse_norm
from flexinfer.layers.onednn_linear import can_pack
from flexinfer.layers.quantised import Scheme
from flexinfer.layers.trial import computes_the_same
from helpers.tiny_models import CONFIGS, make_model, random_prompts, reference

DTYPES = [torch.float32]
if can_pack(torch.bfloat16, torch.device("cpu")):
    DTYPES.append(torch.bfloat16)


def plain_linear(out_features: int = 4, dtype: Any = torch.float32) -> Any:
    return torch.nn.Linear(32, out_features, dtype=dtype)


def test_replaced_modules_are_let_go_of_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the weights of a whole model are held twice."""
    model = torch.nn.Sequential(*(torch.nn.Sequential(plain_linear()) for _ in range(3)))
    layers = [weakref.ref(model[i][0]) for i in range(3)]
    num_alive: list[int] = []

    def replace(module: Any) -> Any:
        if isinstance(module, torch.nn.Linear):
            num_alive.append(sum(layer() is not None for layer in layers))
            return make_linear(module, weight_format=WeightFormat.PLAIN)
        return None

    monkeypatch.setattr(fuse, "RULES", (fuse.RULES[0]._replace(fuse=replace),))
    fuse_layers(model)
    assert num_alive == [3, 2, 1]


@pytest.mark.parametrize(("newest", "warns"), [((5, 16), True), ((99, 0), False)])
def test_attention_that_a_newer_transformers_writes_anew_is_told_of(
    newest: Any, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fuse, "NEWEST_TRANSFORMERS", newest)
    fuse_layers(copy.deepcopy(make_model("llama")))
    fuse_layers(torch.nn.Linear(32, 4, device="meta"))  # as on a GPU: nothing is fused there
    assert not caplog.records
    fuse_layers(torch.nn.Sequential(plain_linear()))
    told = [record.message for record in caplog.records]
    assert [f"transformers {tf.__version__} is newer than 5.16" in m for m in told] == [
        True
    ] * warns


@settings(max_examples=40, deadline=None)
@given(
    rows=st.sampled_from([0, 1, 2, 7, 32, 130]),
    sizes=st.tuples(st.sampled_from([16, 96, 257]), st.sampled_from([64, 100, 513])),
    bias=st.booleans(),
)
def test_packed_linear_equals_linear(rows: int, sizes: tuple[int, int], bias: bool) -> None:
    torch.manual_seed(rows)
    linear = torch.nn.Linear(*sizes, bias=bias, dtype=torch.bfloat16)
    packed = make_linear(linear, weight_format=WeightFormat.ONEDNN)
    x = torch.randn(1, rows, sizes[0], dtype=torch.bfloat16)
    with torch.inference_mode():
        torch.testing.assert_close(packed(x), linear(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_fused_model_gives_the_same_logits(name: str, dtype: Any) -> None:
    model = copy.deepcopy(make_model(name)).to(dtype)
    fused = copy.deepcopy(model)
    fuse_layers(fused)
    ids = torch.tensor(random_prompts((9,)))
    with torch.inference_mode():
        expected, logits = model(ids).logits, fused(ids).logits
    scale = expected.abs().max()
    assert (logits - expected).abs().max() <= (1e-5 if dtype == torch.float32 else 0.06) * scale


@pytest.mark.parametrize("num_tokens", [1, 1024, 1025, 2300])
@pytest.mark.parametrize("has_residual", [False, True])
def test_an_mlp_in_blocks_of_rows_is_the_same(
    num_tokens: int, has_residual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(make_model("llama"))
    fuse_layers(model)
    layer = next(module for name, module in model.named_modules() if name.endswith("mlp"))
    assert isinstance(layer, GatedMLP)
    x = torch.randn(1, num_tokens, model.config.hidden_size)
    residual = torch.randn_like(x) if has_residual else None
    with torch.inference_mode():
        blocks = layer(x, residual)
        monkeypatch.setattr(mlp, "BLOCK_ROWS", num_tokens)
        torch.testing.assert_close(blocks, layer(x, residual))


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_a_quantised_mlp_holds_one_block_of_hidden_numbers(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the same bits: its kernels work in such blocks whatever they are given."""
    config = tf.LlamaConfig(**{**CONFIGS["llama"]().to_dict(), "num_hidden_layers": 1})
    model = tf.LlamaForCausalLM(config).eval()
    fuse_layers(model, Scheme.parse(scheme))
    layer = model.model.layers[0].mlp
    assert isinstance(layer, GatedMLP)
    limit, seen = layer.gate_up_proj.block_rows, []
    assert limit is not None
    multiply = layer.gate_up_proj.multiply
    monkeypatch.setattr(
        layer.gate_up_proj,
        "multiply",
        lambda x, residual: seen.append(x.shape[1]) or multiply(x, residual),
    )
    x = torch.randn(1, 2 * limit + 1, config.hidden_size)
    residual = torch.randn_like(x)
    with torch.inference_mode():
        blocks = layer(x, residual)
        assert sum(seen) == x.shape[1]
        assert max(seen) <= limit
        assert torch.equal(blocks, layer._compute(x, residual))


@pytest.mark.parametrize("name", CONFIGS)
def test_fused_models_generate_what_transformers_does(name: str, tmp_path: Path) -> None:
    make_model(name).save_pretrained(tmp_path)
    prompts = random_prompts((5, 17, 40, 1))
    settings = {"skip_tokenizer_init": True, "max_num_seqs": 4, "kv_cache_memory_bytes": 64 << 20}
    with LLM(str(tmp_path), **settings) as llm:
        outputs = llm.generate(
            prompts, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False
        )
    answers = [output.outputs[0].token_ids for output in outputs]
    assert answers == [reference(name, tuple(prompt), 12) for prompt in prompts]


def classes(model: Any) -> list[str]:
    return [type(module).__name__ for module in model.modules()]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_layers_of_a_llama_are_replaced(dtype: Any) -> None:
    model = copy.deepcopy(make_model("llama")).to(dtype)
    fuse_layers(model)
    names = classes(model)
    for name in ("FusedDecoderLayer", "FusedAttention"):
        assert names.count(name) == model.config.num_hidden_layers
    assert names.count("GatedMLP") == model.config.num_hidden_layers
    assert not {"LlamaDecoderLayer", "LlamaRMSNorm", "LlamaMLP"} & set(names)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_whole_layers_of_common_models_are_replaced(name: str) -> None:
    model = copy.deepcopy(make_model(name))
    fuse_layers(model)
    names = classes(model)
    assert names.count("FusedDecoderLayer") == model.config.num_hidden_layers
    assert names.count("GatedMLP") == model.config.num_hidden_layers


def test_a_layer_that_scales_its_residual_stays() -> None:
    """Granite's layers have the children of Llama's, and compute something else."""
    torch.manual_seed(0)
    config = tf.GraniteConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        residual_multiplier=0.25,
        attention_multiplier=0.1,
    )
    model = tf.GraniteForCausalLM(config).eval()
    fused = copy.deepcopy(model)
    fuse_layers(fused)
    assert (
        classes(fused).count("FusedAttention") == classes(fused).count("GraniteDecoderLayer") == 2
    )
    ids = torch.tensor([[5, 9, 2, 77]])
    with torch.inference_mode():
        torch.testing.assert_close(fused(ids).logits, model(ids).logits)


@pytest.mark.parametrize("change", ["rotary", "extra"])
def test_an_attention_that_computes_something_else_stays(change: str) -> None:
    """Another forward under the same children: without positions, or with one more argument."""
    model = copy.deepcopy(make_model("llama"))

    class Other(type(model.model.layers[0].self_attn)):  # type: ignore[misc]
        def forward(self, hidden_states: Any, position_embeddings: Any, **kwargs: Any) -> Any:
            apply_rotary_pos_emb = modeling_llama.apply_rotary_pos_emb  # named, not called
            assert apply_rotary_pos_emb is not None
            if change == "extra":
                return super().forward(hidden_states, position_embeddings, sparsity=2, **kwargs)
            ones, zeros = (torch.full_like(position_embeddings[0], x) for x in (1, 0))
            return super().forward(hidden_states, (ones, zeros), **kwargs)

    for layer in model.model.layers:
        layer.self_attn.__class__ = Other
    Other.forward.__globals__["apply_rotary_pos_emb"] = modeling_llama.apply_rotary_pos_emb
    fuse_layers(model)
    assert "FusedAttention" not in classes(model)
    assert "Other" in classes(model)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_layer_adds_the_residual(dtype: Any) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 64, dtype=dtype)
    packed = make_linear(linear, weight_format=WeightFormat.ONEDNN)
    x, residual = torch.randn(1, 7, 96).to(dtype), torch.randn(1, 7, 64).to(dtype)
    with torch.inference_mode():
        expected = residual.float() + linear(x).float()
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(packed(x, residual).float(), expected, atol=16 * eps, rtol=eps)


def test_joined_layers_are_one_after_the_other() -> None:
    torch.manual_seed(0)
    linears = [torch.nn.Linear(32, 16), torch.nn.Linear(32, 48, bias=False)]
    x = torch.randn(5, 32)
    with torch.inference_mode():
        expected = torch.cat([linear(x) for linear in linears], dim=-1)
        torch.testing.assert_close(make_linear(*linears)(x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Gemma2RMSNorm, Gemma4RMSNorm, Qwen3NextRMSNorm])
def test_a_norm_whose_weight_is_read_in_float32_keeps_all_its_bits(
    kind: Any, dtype: torch.dtype
) -> None:
    """Gemma's is 1 + weight: of 1.004 bfloat16 would make 1."""
    torch.manual_seed(0)
    norm = kind(64, eps=1e-3).to(dtype)
    norm.weight.data.normal_(std=0.004)
    fused = fuse_norm(norm)
    assert fused is not None
    x = torch.randn(1, 300, 64).to(dtype)
    with torch.inference_mode():
        output, expected = fused(x), norm(x)
    assert output.dtype == dtype
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=max(torch.finfo(dtype).eps, 1e-6))
    assert dtype == torch.float32 or (output == expected).float().mean() > 0.99


@pytest.mark.parametrize(
    "norm", [Gemma4RMSNorm(64, with_scale=False), Llama4TextRMSNorm(64)], ids=lambda n: str(type(n))
)
def test_a_norm_with_another_formula_stays(norm: Any) -> None:
    assert fuse_norm(norm) is None


def test_a_model_that_was_handed_over_stays() -> None:
    model = make_model("llama")
    with LLM(model, skip_tokenizer_init=True, kv_cache_memory_bytes=64 << 20):
        assert not any(isinstance(m, (Linear, GatedMLP, RMSNorm)) for m in model.modules())


def test_a_module_that_is_watched_stays() -> None:
    model = copy.deepcopy(make_model("llama"))
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    fuse_layers(model)
    assert classes(model).count("LlamaMLP") == 1
    assert classes(model).count("GatedMLP") == model.config.num_hidden_layers - 1


def test_a_replacement_that_computes_something_else_is_told() -> None:
    norm = RMSNorm(torch.ones(64), 1e-6)
    for weight, eps, same in ((1, 1e-6, True), (1, 1e-1, False), (1.01, 1e-6, False)):
        other = RMSNorm(torch.full((64,), float(weight)), eps)
        assert computes_the_same(norm, other, 64, torch.float32) is same


def test_what_only_large_numbers_reach_is_told() -> None:
    linear = plain_linear(16)

    class Clamped(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).clamp(-100, 100)

    clamped = Clamped(32, 16)
    clamped.load_state_dict(linear.state_dict())
    assert not computes_the_same(clamped, linear, 32, torch.float32)


def test_gelu_by_tanh_is_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Gemma's MLPs have it; in a graph it is torch's."""
    model = make_model("gemma3")
    own = model.model.layers[0].mlp
    x = torch.randn(1, 20, model.config.hidden_size)
    with torch.inference_mode():
        expected = own(x)
        fused = mlp.fuse_mlp(own)
        assert fused is not None
        calls: list[Any] = []
        multiply = mlp.row_ops.gelu_tanh_mul
        monkeypatch.setattr(
            mlp.row_ops, "gelu_tanh_mul", lambda *halves: calls.append(1) or multiply(*halves)
        )
        torch.testing.assert_close(fused(x), expected, atol=1e-5, rtol=1e-5)
        assert calls == [1]
        compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), expected, atol=1e-5, rtol=1e-5)
        assert calls == [1]
