"""A mixture of experts in one call equals its slow definition, and what transformers computes."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from flexinfer import _kernels
from flexinfer.layers import fuse_experts, host_linear, quantised_linear
from flexinfer.layers.expert_weights import ExpertWeights
from flexinfer.layers.experts import Experts, slow_experts
from flexinfer.layers.fuse import fuse_layers
from flexinfer.layers.fuse_experts import is_experts
from flexinfer.layers.quantised import QuantisedTensor, Scheme
from helpers.each_isa import each_isa
from helpers.every_architecture import MODEL_TYPES, tiny_model
from helpers.random_experts import (
    DRAWS,
    NUM_EXPERTS,
    WIDTH,
    check,
    check_takes_the_place,
    draw,
    own_experts,
    route,
    table,
)
from helpers.slow_products import with_dequantised

EXAMPLES = settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SCHEMES = ("int8", "int4", "int4-zp", "int4-g64-zp", "int4-a8", "Q8_0 a8", "Q6_K a8", "Q4_K a8")

isa = each_isa(quantised_linear, _kernels.available_quantised_isas())
plain_isa = each_isa(host_linear, _kernels.available_isas())


SHAPES = {
    "draw_some": st.sampled_from(DRAWS),
    "tokens": st.sampled_from([0, 1, 2, 7, 33, 130]),
    "top_k": st.integers(1, 4),
    "hidden": st.sampled_from([64, 192]),
    "dtype": st.sampled_from([torch.float32, torch.bfloat16]),
}


@EXAMPLES
@given(scheme=st.sampled_from(SCHEMES), **SHAPES)
def test_quantised_experts_are_their_slow_products(
    isa: str, scheme: str, draw_some: Any, tokens: int, top_k: int, hidden: int, dtype: Any
) -> None:
    torch.manual_seed(tokens)
    check(draw_some(scheme, hidden, dtype), tokens, top_k, dtype)


@EXAMPLES
@given(**SHAPES)
def test_plain_experts_are_their_slow_products(
    plain_isa: str, draw_some: Any, tokens: int, top_k: int, hidden: int, dtype: Any
) -> None:
    torch.manual_seed(tokens)
    check(draw_some(None, hidden, dtype), tokens, top_k, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", [None, *SCHEMES])
@pytest.mark.parametrize("draw_some", DRAWS)
def test_a_token_is_the_same_bits_among_whatever_tokens(
    draw_some: Any, scheme: str | None, dtype: Any
) -> None:
    torch.manual_seed(0)
    experts = draw_some(scheme, 64, dtype).layer(dtype)
    x, index, weights = route(263, 3, dtype)
    index[:200] %= 2  # experts of many rows, beside those of a few
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = [experts(x[i : i + 1], index[i : i + 1], weights[i : i + 1]) for i in range(len(x))]
        torch.set_num_threads(2)
        together = experts(x, index, weights)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together, torch.cat(alone))


def test_more_rows_than_are_computed_at_once() -> None:
    torch.manual_seed(0)
    check(draw("int4", 64, torch.float32), 1500, 4, torch.float32)


@pytest.mark.parametrize("scheme", [None, "int8", "int4"])
@pytest.mark.parametrize("draw_some", DRAWS)
def test_tokens_that_are_not_numbers_spoil_themselves_alone(
    draw_some: Any, scheme: str | None
) -> None:
    torch.manual_seed(0)
    experts = draw_some(scheme, 64, torch.float32).layer(torch.float32)
    x, index, weights = route(9, 2, torch.float32)
    index[:] = torch.tensor([1, 4])
    expected = experts(x, index, weights)
    x[3] = torch.nan
    output = experts(x, index, weights)
    assert output[3].isnan().all()
    kept = torch.arange(9) != 3
    assert torch.equal(output[kept], expected[kept])


def test_gates_and_factors_may_be_of_two_kinds() -> None:
    """As of a file whose types are mixed."""
    torch.manual_seed(0)
    gate_up, down, *_ = draw(None, 64, torch.float32)
    kinds = Scheme.parse("int4"), Scheme.parse("int4-g64-zp")
    parts = [
        [kind.quantise(w[i * 64 : i * 64 + 64]) for w in gate_up] for i, kind in enumerate(kinds)
    ]
    experts = Experts([table(part) for part in parts], table(down), torch.float32)
    joined = [torch.cat([a.dequantised(), b.dequantised()]) for a, b in zip(*parts, strict=True)]
    x, index, weights = route(20, 3, torch.float32)
    expected = slow_experts(joined, down, x, index, weights)
    torch.testing.assert_close(experts(x, index, weights), expected)


def test_some_experts_alone_may_have_minimums() -> None:
    torch.manual_seed(0)
    drawn, with_zeros = draw("int4", 64, torch.float32), draw("int4-zp", 64, torch.float32)
    gate_up = [*with_zeros.gate_up[:2], *drawn.gate_up[2:]]
    check(drawn._replace(gate_up=gate_up), 20, 3, torch.float32)


def test_what_the_kernel_would_read_beyond_is_refused() -> None:
    experts = draw("int4", 64, torch.float32).layer(torch.float32)
    x, index, weights = route(3, 2, torch.float32)
    for wrong in (x[:, :-16], x[:2], x.bfloat16()):
        with pytest.raises(ValueError, match=rf"\[tokens, {WIDTH}\] of torch\.float32"):
            experts(wrong, index, weights)
    with pytest.raises(ValueError, match="experts and weights of each token"):
        experts(x, index, weights[:, :1])
    for expert in (-1, NUM_EXPERTS + 1):
        with pytest.raises(ValueError, match="routed to an expert that there is not"):
            experts(x, torch.full_like(index, expert), weights)


def test_experts_of_several_shapes_or_kinds_are_refused() -> None:
    gate_up, down, *_ = draw(None, 64, torch.float32)
    with pytest.raises(ValueError, match="one shape"):
        table([gate_up[0], down[0]])
    with pytest.raises(ValueError, match="do not go together"):
        Experts([table(down)], table(down), torch.float32)
    int4, int8 = draw("int4", 64, torch.float32)[0], draw("int8", 64, torch.float32)[0]
    mixed = ExpertWeights(2)
    mixed.add(int4[0])
    with pytest.raises((ValueError, RuntimeError)):
        mixed.add(int8[0])


def test_a_compiled_graph_calls_the_same_kernel() -> None:
    torch.manual_seed(0)
    experts = draw("int4", 64, torch.float32).layer(torch.float32)
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    with torch.inference_mode():
        call = route(5, 2, torch.float32)
        assert torch.equal(compiled(*call), experts(*call))


def mixtral(**settings: Any) -> Any:
    """transformers' own."""
    config = MixtralConfig(
        hidden_size=64, intermediate_size=96, num_local_experts=NUM_EXPERTS, **settings
    )
    return own_experts(MixtralExperts, config)


@pytest.mark.parametrize("scheme", [None, "int8", "int4", "int4-zp", "int4-a8"])
def test_it_takes_the_place_of_transformers_experts(scheme: str | None) -> None:
    torch.manual_seed(0)
    check_takes_the_place(mixtral(), None if scheme is None else Scheme.parse(scheme))


@pytest.mark.parametrize(
    "change",
    ["has_bias", "is_transposed", "implementation", "activation", "gate", "forward", "width"],
)
def test_experts_that_compute_something_else_stay(change: str) -> None:
    experts = mixtral(**({"hidden_act": "gelu"} if change == "activation" else {}))
    kind = type(experts)
    if change in ("has_bias", "is_transposed"):
        setattr(experts, change, True)
    elif change == "implementation":
        experts.config._experts_implementation = "of somebody"
    elif change == "gate":
        experts.__class__ = type("Other", (kind,), {"_apply_gate": lambda self, x: x})
    elif change == "forward":
        experts.__class__ = type("Other", (kind,), {"forward": lambda self, x, *rest: x})
    elif change == "width":
        for name, shape in (("gate_up_proj", (2, 40, 24)), ("down_proj", (2, 24, 20))):
            setattr(experts, name, torch.nn.Parameter(torch.zeros(shape)))
    assert not is_experts(experts)  # told before any trial
    model = torch.nn.ModuleDict({"experts": experts})
    fuse_layers(model, Scheme.parse("int8"))
    assert model["experts"] is experts


def test_a_trial_tells_what_the_code_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = mixtral()
    model = torch.nn.ModuleDict({"experts": experts})
    monkeypatch.setattr(fuse_experts, "slow_experts", lambda *call: 1.01 * slow_experts(*call))
    fuse_layers(model, Scheme.parse("int8"))
    assert model["experts"] is experts


WITH_EXPERTS = {
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "mixtral",
    "nemotron_h",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
}


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_quantised_experts_of_each_architecture(model_type: str) -> None:
    """Their layers give what transformers' give with the numbers that the integers stand for."""
    model = tiny_model(model_type)
    names = [] if model is None else [n for n, m in model.named_modules() if is_experts(m)]
    assert names or model_type not in WITH_EXPERTS
    if not names:
        pytest.skip("has no experts, or such as are not known")
    own = model.get_submodule(names[0])
    scheme = Scheme.parse("int4")
    fused = fuse_experts.lay_out_if_the_same(own, scheme)
    assert fused is not None
    with_dequantised(own, scheme)
    count = len(own.down_proj)
    x, index = torch.randn(9, fused.width), torch.rand(9, count).argsort(dim=1)[:, :2]
    weights = torch.rand(9, 2)
    with torch.inference_mode():
        torch.testing.assert_close(
            fused(x, index, weights), own(x, index, weights), atol=1e-4, rtol=1e-4
        )


def test_a_quantised_tensor_of_experts_takes_its_bits() -> None:
    experts = draw("int4", 64, torch.float32)
    assert isinstance(experts.gate_up[0], QuantisedTensor)
    numbers = NUM_EXPERTS * 3 * 64 * WIDTH
    assert experts.layer(torch.float32).nbytes == numbers // 2 + numbers // 32 * 2
    numbers_of_bytes = draw("int8", 64, torch.float32).layer(torch.float32).nbytes
    assert numbers_of_bytes == numbers + NUM_EXPERTS * (2 * 64 + WIDTH) * (4 + 4)
