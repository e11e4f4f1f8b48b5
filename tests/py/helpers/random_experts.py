"""Random experts, plain or quantised, and tokens for them: the kernel beside its definition."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch

from flexinfer.layers.activation import GELU_TANH, RELU2, SILU, Activation, clamped_swiglu
from flexinfer.layers.expert_weights import ExpertWeights, Weight
from flexinfer.layers.experts import Experts, slow_experts
from flexinfer.layers.fuse import fuse_layers
from flexinfer.layers.quantised import QuantisedTensor, Scheme
from helpers.slow_products import with_dequantised
from helpers.stored_weights import quantise

NUM_EXPERTS, WIDTH = 6, 128


class Drawn(NamedTuple):
    """What `slow_experts` and the kernel are both given."""

    gate_up: list[Weight]
    down: list[Weight]
    biases: Any = None
    activation: Activation = SILU

    def layer(self, dtype: Any) -> Experts:
        first, last = self.biases or (None, None)
        tables = [table(self.gate_up, first)], table(self.down, last)
        return Experts(*tables, dtype, self.activation)

    def slow(self, x: Any, index: Any, weights: Any) -> Any:
        tables = self.gate_up, self.down
        return slow_experts(*tables, x, index, weights, self.biases, self.activation)


def draw(scheme: str | None, hidden: int, dtype: Any, activation: Activation = SILU) -> Drawn:
    first = (2 if activation.has_gates else 1) * hidden
    gate_up = [torch.randn(first, WIDTH) / WIDTH**0.5 for _ in range(NUM_EXPERTS)]
    down = [torch.randn(WIDTH, hidden) / hidden**0.5 for _ in range(NUM_EXPERTS)]
    tables = [
        [w.to(dtype) if scheme is None else quantise(scheme, w) for w in weights]
        for weights in (gate_up, down)
    ]
    return Drawn(*tables, activation=activation)


def draw_gelu(scheme: str | None, hidden: int, dtype: Any) -> Drawn:
    """As Gemma 4's."""
    return draw(scheme, hidden, dtype, GELU_TANH)


def draw_without_gates(scheme: str | None, hidden: int, dtype: Any) -> Drawn:
    """As Nemotron-H's."""
    return draw(scheme, hidden, dtype, RELU2)


def draw_clamped(scheme: str | None, hidden: int, dtype: Any) -> Drawn:
    """As gpt-oss's: with biases, and with clamps that a third of the numbers reach."""
    biases = [torch.randn(NUM_EXPERTS, n).to(dtype) for n in (2 * hidden, WIDTH)]
    drawn = draw(scheme, hidden, dtype, clamped_swiglu(alpha=1.702, limit=1.25))
    return drawn._replace(biases=tuple(map(list, biases)))


DRAWS = (draw, draw_gelu, draw_clamped, draw_without_gates)


def table(weights: list[Weight], biases: list[Any] | None = None) -> ExpertWeights:
    built = ExpertWeights(len(weights))
    for weight, bias in zip(weights, biases or [None] * len(weights), strict=True):
        built.add(weight, bias)
    return built


def route(tokens: int, top_k: int, dtype: Any) -> tuple[Any, Any, Any]:
    """x, experts and their weights of random tokens; some tokens have an expert less."""
    x = torch.randn(tokens, WIDTH).to(dtype)
    index = torch.rand(tokens, NUM_EXPERTS + 1).argsort(dim=1)[:, :top_k]
    return x, index, torch.rand(tokens, top_k).to(dtype)


def check(drawn: Drawn, tokens: int, top_k: int, dtype: Any) -> None:
    x, index, weights = route(tokens, top_k, dtype)
    output, expected = drawn.layer(dtype)(x, index, weights), drawn.slow(x, index, weights)
    # What goes into a second product may be a rounding error away from the middle of two numbers of
    # bfloat16, or of two integers, and become either.
    bound = 1e-6 if dtype == torch.float32 else 0.02
    down = drawn.down[0]
    rounds_inputs = isinstance(down, QuantisedTensor) and down.byte_inputs
    bound = max(bound, 2e-3 if rounds_inputs else 0)
    assert output.dtype == dtype
    assert (output.double() - expected.double()).norm() <= bound * expected.double().norm()


def own_experts(kind: Any, config: Any) -> Any:
    """transformers' own, of random numbers."""
    config._experts_implementation = "grouped_mm"
    experts = kind(config).eval()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return experts


def check_takes_the_place(own: Any, scheme: Scheme | None) -> None:
    """The kernel computes what transformers' experts do, with the numbers that it has of them.
    own: of 64 inputs; its numbers become those that the scheme makes of them."""
    model = torch.nn.ModuleDict({"experts": copy.deepcopy(own)})
    fuse_layers(model, scheme)
    assert isinstance(model["experts"], Experts)
    if scheme is not None:
        with_dequantised(own, scheme)
    x, index = torch.randn(9, 64), torch.rand(9, NUM_EXPERTS).argsort(1)[:, :2]
    weights = torch.rand(9, 2)
    with torch.inference_mode():
        expected, output = own(x, index, weights), model["experts"](x, index, weights)
    bound = 0.02 if scheme is not None and scheme.byte_inputs else 1e-5
    assert (output - expected).norm() <= bound * expected.norm()
