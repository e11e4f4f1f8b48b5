"""gpt-oss's experts: biases, clamped gates, weights that lie otherwise. What all experts have in
common is in test_experts.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from flexinfer import _kernels
from flexinfer.layers import fuse_experts, rows
from flexinfer.layers.activation import clamped_swiglu
from flexinfer.layers.expert_layout import layout_of
from flexinfer.layers.expert_weights import ExpertWeights
from flexinfer.layers.experts import Experts, slow_experts
from flexinfer.layers.fuse import fuse_layers
from flexinfer.layers.fuse_experts import is_experts
from flexinfer.layers.quantised import Scheme
from helpers.each_isa import each_isa
from helpers.random_experts import (
    NUM_EXPERTS,
    check,
    check_takes_the_place,
    draw,
    draw_clamped,
    own_experts,
    route,
    table,
)
from helpers.slow_products import expert_weights

DTYPES = (torch.float32, torch.bfloat16)

row_isa = each_isa(rows, _kernels.available_isas())


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gate_is_that_of_its_definition(row_isa: str, dtype: Any) -> None:
    """Of numbers below, between and above the limits, and of the largest that there are. In sums of
    large numbers that are small ones, what float32 has rounded is larger beside them."""
    torch.manual_seed(0)
    drawn = draw_clamped(None, 64, dtype)
    for scale in (1.0, 1e3, 1e30):
        x, index, weights = route(40, 2, dtype)
        output = drawn.layer(dtype)(x * scale, index, weights)
        expected = drawn.slow(x * scale, index, weights)
        bound = 1e-5 if dtype == torch.float32 else 0.02
        assert output.isfinite().all()
        assert (output.double() - expected.double()).norm() <= bound * expected.double().norm()


@pytest.mark.parametrize("half", [slice(0, 64), slice(64, 128)])
def test_a_clamp_makes_no_number_of_what_is_none(row_isa: str, half: slice) -> None:
    """Of gates and of factors."""
    torch.manual_seed(0)
    drawn = draw_clamped(None, 64, torch.float32)
    drawn.biases[0][2][half] = torch.nan
    x, index, weights = route(9, 2, torch.float32)
    index[:] = torch.tensor([1, 4])
    index[3] = torch.tensor([1, 2])
    output = drawn.layer(torch.float32)(x, index, weights)
    assert output[3].isnan().all()
    assert output[torch.arange(9) != 3].isfinite().all()


def test_gates_and_factors_of_two_kinds_have_their_parts_of_the_bias() -> None:
    torch.manual_seed(0)
    drawn = draw_clamped(None, 64, torch.float32)
    kinds = Scheme.parse("int4"), Scheme.parse("int4-g64-zp")
    first, last = drawn.biases
    halves = [slice(0, 64), slice(64, 128)]
    parts = [
        [kind.quantise(w[half]) for w in drawn.gate_up]
        for kind, half in zip(kinds, halves, strict=True)
    ]
    tables = [
        table(part, [b[half] for b in first]) for part, half in zip(parts, halves, strict=True)
    ]
    experts = Experts(tables, table(drawn.down, last), torch.float32, drawn.activation)
    joined = [torch.cat([a.dequantised(), b.dequantised()]) for a, b in zip(*parts, strict=True)]
    call = route(20, 3, torch.float32)
    expected = slow_experts(joined, drawn.down, *call, drawn.biases, drawn.activation)
    torch.testing.assert_close(experts(*call), expected)


def test_biases_that_do_not_go_with_their_weights_are_refused() -> None:
    gate_up, down, (first, last), _ = draw_clamped("int4", 64, torch.float32)
    with pytest.raises(ValueError, match=r"with 128 outputs is \[64\]"):
        table(gate_up, [bias[:64] for bias in first])
    some = ExpertWeights(2)
    some.add(gate_up[0], first[0])
    with pytest.raises(ValueError, match="all have biases, or none"):
        some.add(gate_up[1])
    with pytest.raises(ValueError, match=r"of torch\.bfloat16 have biases of torch\.float32"):
        Experts([table(gate_up, first)], table(down, last), torch.bfloat16)
    for alpha, limit in ((1.702, 0.0), (1.702, float("inf")), (float("nan"), 7.0)):
        with pytest.raises(ValueError, match="cannot be computed"):
            clamped_swiglu(alpha, limit)


def gpt_oss(**settings: Any) -> Any:
    """transformers' own; a third of its gates and factors reach the clamps."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": NUM_EXPERTS}
    config = GptOssConfig(**{**sizes, "swiglu_limit": 2.0, **settings})
    return own_experts(GptOssExperts, config)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("scheme", [None, "int8", "int4", "int4-zp", "int4-a8"])
def test_it_takes_the_place_of_transformers_experts(
    scheme: str | None, implementation: str
) -> None:
    torch.manual_seed(0)
    own = gpt_oss(swiglu_alpha=1.5)
    own.config._experts_implementation = implementation
    check_takes_the_place(own, None if scheme is None else Scheme.parse(scheme))


def test_what_a_checkpoint_has_is_read_into_the_parameters_as_they_lie() -> None:
    """Where the experts stay transformers' own."""
    torch.manual_seed(0)
    own = gpt_oss()
    gate_up, down = expert_weights(own)
    read = copy.deepcopy(own)
    for parameter in (read.gate_up_proj, read.down_proj):
        parameter.data.zero_()
    fuse_experts.store(read, lambda expert: ([*gate_up[expert].chunk(2)], down[expert]))
    fuse_experts.read_all(read)
    for name, parameter in own.named_parameters():
        assert torch.equal(read.get_parameter(name), parameter), name
    assert torch.equal(gate_up[1, 3], own.gate_up_proj[1, :, 6])
    assert torch.equal(gate_up[1, 96 + 3], own.gate_up_proj[1, :, 7])


@pytest.mark.parametrize(
    "change", ["has_bias", "is_transposed", "is_concatenated", "limit", "alpha", "gate", "width"]
)
def test_experts_that_compute_something_else_stay(change: str) -> None:
    experts = gpt_oss(**({"hidden_size": 40} if change == "width" else {}))
    if change in ("has_bias", "is_transposed", "is_concatenated"):
        setattr(experts, change, not getattr(experts, change))
    elif change == "limit":
        experts.limit = None
    elif change == "alpha":
        experts.alpha = float("inf")
    elif change == "gate":
        experts.__class__ = type("Other", (GptOssExperts,), {"_apply_gate": lambda self, x: x})
    assert not is_experts(experts)  # told before any trial
    assert layout_of(gpt_oss()) is not None
    model = torch.nn.ModuleDict({"experts": experts})
    fuse_layers(model, Scheme.parse("int8"))
    assert model["experts"] is experts


def test_a_trial_tells_what_the_code_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = gpt_oss()
    model = torch.nn.ModuleDict({"experts": experts})

    def without_biases(*call: Any) -> Any:
        return slow_experts(*call[:5], None, call[6])

    monkeypatch.setattr(fuse_experts, "slow_experts", without_biases)
    fuse_layers(model, Scheme.parse("int8"))
    assert model["experts"] is experts


def test_silu_may_have_biases_too() -> None:
    torch.manual_seed(0)
    drawn = draw_clamped("int4", 64, torch.float32)
    check(draw("int4", 64, torch.float32)._replace(biases=drawn.biases), 30, 3, torch.float32)
