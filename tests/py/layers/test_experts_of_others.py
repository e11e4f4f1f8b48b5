"""Experts of Gemma 4, whose gates are gelu, and of Nemotron-H, which have none. What all experts
have in common is in test_experts.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from transformers import Gemma4TextConfig, NemotronHConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from flexinfer.layers import fuse_experts
from flexinfer.layers.activation import GELU_TANH, RELU2, SILU
from flexinfer.layers.expert_layout import layout_of
from flexinfer.layers.experts import Experts, slow_experts
from flexinfer.layers.fuse import fuse_layers
from flexinfer.layers.fuse_experts import is_experts
from flexinfer.layers.quantised import Scheme
from helpers.random_experts import (
    NUM_EXPERTS,
    check_takes_the_place,
    draw,
    draw_without_gates,
    own_experts,
    table,
)
from helpers.slow_products import expert_weights


def gemma4(**settings: Any) -> Any:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 96, "num_experts": NUM_EXPERTS}
    config = Gemma4TextConfig(enable_moe_block=True, top_k_experts=2, **{**sizes, **settings})
    return own_experts(Gemma4TextExperts, config)


def nemotron_h(**settings: Any) -> Any:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 96, "n_routed_experts": NUM_EXPERTS}
    return own_experts(NemotronHExperts, NemotronHConfig(**{**sizes, **settings}))


def nemotron_h_of_latents() -> Any:
    return nemotron_h(hidden_size=128, moe_latent_size=64)


OWN = (gemma4, nemotron_h, nemotron_h_of_latents)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("scheme", [None, "int8", "int4", "int4-zp", "int4-a8"])
@pytest.mark.parametrize("make", OWN)
def test_it_takes_the_place_of_transformers_experts(
    make: Callable[[], Any], scheme: str | None, implementation: str
) -> None:
    torch.manual_seed(0)
    own = make()
    own.config._experts_implementation = implementation
    check_takes_the_place(own, None if scheme is None else Scheme.parse(scheme))


@pytest.mark.parametrize(("make", "activation"), [(gemma4, GELU_TANH), (nemotron_h, RELU2)])
def test_a_trial_tells_what_the_code_does_not(
    make: Callable[[], Any], activation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = make()
    model = torch.nn.ModuleDict({"experts": experts})

    def with_silu(*call: Any) -> Any:
        assert call[-1] == activation
        if activation == RELU2:
            return 1.01 * slow_experts(*call)
        return slow_experts(*call[:-1], SILU)

    monkeypatch.setattr(fuse_experts, "slow_experts", with_silu)
    fuse_layers(model, Scheme.parse("int8"))
    assert model["experts"] is experts


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (gemma4, {"hidden_activation": "gelu"}),
        (gemma4, {"hidden_activation": "gelu_python_tanh"}),
        (gemma4, {"hidden_activation": "relu2"}),
        (gemma4, {"moe_intermediate_size": 40}),
        (nemotron_h, {"mlp_hidden_act": "silu"}),
        (nemotron_h, {"mlp_hidden_act": "gelu_pytorch_tanh"}),
        (nemotron_h, {"mlp_hidden_act": "relu"}),
        (nemotron_h, {"hidden_size": 72}),
    ],
)
def test_experts_that_compute_something_else_stay(
    make: Callable[..., Any], settings: dict[str, Any]
) -> None:
    """relu2 of gates there is no kernel for, nor silu without factors."""
    experts = make(**settings)
    assert not is_experts(experts)  # told before any trial
    model = torch.nn.ModuleDict({"experts": experts})
    fuse_layers(model, Scheme.parse("int8"))
    assert model["experts"] is experts


@pytest.mark.parametrize("name", ["has_gate", "has_bias", "is_transposed", "has_post_expert_norm"])
@pytest.mark.parametrize("make", [gemma4, nemotron_h])
def test_what_the_decorator_says_is_looked_at(make: Callable[[], Any], name: str) -> None:
    experts = make()
    assert is_experts(experts)
    setattr(experts, name, not getattr(experts, name))
    assert not is_experts(experts)


@pytest.mark.parametrize("make", OWN)
def test_what_a_checkpoint_has_is_read_into_the_parameters(make: Callable[[], Any]) -> None:
    """Where the experts stay transformers' own."""
    torch.manual_seed(0)
    own = make()
    layout = layout_of(own)
    assert layout is not None
    first, down = expert_weights(own)
    assert first.shape == (NUM_EXPERTS, 96 * (2 if layout.has_gates else 1), 64)
    read = copy.deepcopy(own)
    for parameter in read.parameters():
        parameter.data.zero_()
    halves = 2 if layout.has_gates else 1
    fuse_experts.store(read, lambda expert: ([*first[expert].chunk(halves)], down[expert]))
    fuse_experts.read_all(read)
    for name, parameter in own.named_parameters():
        assert torch.equal(read.get_parameter(name), parameter), name


def test_without_gates_there_are_as_many_outputs_as_the_second_product_has_inputs() -> None:
    gated, plain = draw(None, 64, torch.float32), draw_without_gates(None, 64, torch.float32)
    for drawn, activation in ((gated, RELU2), (plain, SILU)):
        tables = [table(drawn.gate_up)], table(drawn.down)
        with pytest.raises(ValueError, match="do not go together"):
            Experts(*tables, torch.float32, activation)
