"""Random experts, plain or quantised, and tokens for them: the kernel beside its definition."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch

from flexinfer.layers.clamped_gate import ClampedGate
from flexinfer.layers.expert_weights import ExpertWeights
from flexinfer.layers.experts import Experts, Weight, slow_experts
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
    gate: ClampedGate | None = None

    def layer(self, dtype: Any) -> Experts:
        first, last = self.biases or (None, None)
        return Experts([table(self.gate_up, first)], table(self.down, last), dtype, self.gate)

    def slow(self, x: Any, index: Any, weights: Any) -> Any:
        return slow_experts(self.gate_up, self.down, x, index, weights, self.biases, self.gate)


def draw(scheme: str | None, hidden: int, dtype: Any) -> Drawn:
    gate_up = [torch.randn(2 * hidden, WIDTH) / WIDTH**0.5 for _ in range(NUM_EXPERTS)]
    down = [torch.randn(WIDTH, hidden) / hidden**0.5 for _ in range(NUM_EXPERTS)]
    if scheme is None:
        return Drawn([w.to(dtype) for w in gate_up], [w.to(dtype) for w in down])
    return Drawn([quantise(scheme, w) for w in gate_up], [quantise(scheme, w) for w in down])


def draw_clamped(scheme: str | None, hidden: int, dtype: Any) -> Drawn:
    """As gpt-oss's: with biases, and with clamps that a third of the numbers reach."""
    biases = [torch.randn(NUM_EXPERTS, n).to(dtype) for n in (2 * hidden, WIDTH)]
    gate = ClampedGate(alpha=1.702, limit=1.25)
    return draw(scheme, hidden, dtype)._replace(biases=tuple(map(list, biases)), gate=gate)


DRAWS = (draw, draw_clamped)


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
