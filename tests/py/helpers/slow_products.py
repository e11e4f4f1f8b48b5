"""Models whose quantised products are computed as their definition says, slowly."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from flexinfer.checkpoints.checkpoint import EXPERT_PARTS, Checkpoint, expert_weight
from flexinfer.layers.expert_layout import layout_of
from flexinfer.layers.experts import slow_experts
from flexinfer.layers.fuse_experts import is_experts
from flexinfer.layers.quantise import head_of, quantisable, scheme_of
from flexinfer.layers.quantised import QuantisedTensor, Scheme
from helpers.tiny_models import make_model

SPLIT_INPUTS = ("o_proj", "down_proj")
"""Layers of whose inputs each rank has a part."""

BY_ROUNDING = 0.02
"""How far behind (see `furthest_behind`) tokens may be where inputs become bytes: one that is a
rounding error away from the middle of two integers may become either."""


class SlowLinear(torch.nn.Module):
    """A linear layer whose weight is quantised in parts, each with inputs of its own."""

    def __init__(self, sources: Sequence[QuantisedTensor], bias: torch.Tensor | None) -> None:
        super().__init__()
        self.sources, self.bias = sources, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.chunk(len(self.sources), dim=-1)
        product = sum(s.reference(part) for s, part in zip(self.sources, parts, strict=True))
        return (product if self.bias is None else product + self.bias).to(x.dtype)  # type: ignore[union-attr]


Weights = list[QuantisedTensor]


class SlowExperts(torch.nn.Module):
    """Experts whose weights are quantised in parts, each of some of the hidden numbers."""

    def __init__(self, parts: Sequence[tuple[Weights, Weights]], own: Any) -> None:
        """parts: gates and factors of each expert, and what outputs are made with. own: the module
        that they are of, which has biases only where there is one part."""
        super().__init__()
        layout = layout_of(own)
        assert layout is not None
        assert len(parts) == 1 or not layout.has_bias
        self.parts, self.activation = parts, layout.activation(own)
        biases = [layout.biases(own, expert) for expert in range(len(own.down_proj))]
        self.biases: Any = tuple(zip(*biases, strict=True))

    def forward(self, x: Any, index: Any, weights: Any) -> Any:
        return sum(
            slow_experts(*part, x, index, weights, self.biases, self.activation)
            for part in self.parts
        )


def quantised_parts(experts: Any, scheme: Scheme, num_parts: int) -> list[tuple[Weights, Weights]]:
    gate_up, down = expert_weights(experts)
    gates, factors = (half.chunk(num_parts, dim=1) for half in gate_up.chunk(2, dim=1))
    downs = down.chunk(num_parts, dim=2)
    return [
        (
            [scheme.quantise(weight) for weight in torch.cat([gate, factor], dim=1)],
            [scheme.quantise(weight) for weight in down],
        )
        for gate, factor, down in zip(gates, factors, downs, strict=True)
    ]


def with_dequantised(experts: Any, scheme: Scheme) -> None:
    """The numbers that the integers stand for, in place."""
    layout = layout_of(experts)
    assert layout is not None
    for expert in range(len(experts.down_proj)):
        weights = layout.weights(experts, expert)
        gate_up, down = (scheme.quantise(weight).dequantised() for weight in weights)
        for name, weight in zip(layout.weight_names, layout.as_held(gate_up, down), strict=True):
            getattr(experts, name).data[expert] = weight


def expert_weights(experts: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all experts of a module: [experts, 2 * hidden, width], gates before factors, and
    [experts, width, hidden]."""
    layout = layout_of(experts)
    assert layout is not None
    pairs = [layout.weights(experts, expert) for expert in range(len(experts.down_proj))]
    gate_up, down = (torch.stack(weights) for weights in zip(*pairs, strict=True))
    return gate_up, down


def slow_model(model: Any, scheme: Scheme, num_ranks: int = 1) -> Any:
    """transformers' own modules around slow products with the same integers; where inputs stay as
    they are, its own experts with the numbers that the integers stand for; and so the embedding
    that a head is tied to. model: or a name of `tiny_models`."""
    model = copy.deepcopy(make_model(model) if isinstance(model, str) else model)
    for path, module in list(model.named_modules()):
        if is_experts(module) and (scheme.byte_inputs or num_ranks > 1):
            parts = quantised_parts(module, scheme, num_ranks)
            model.set_submodule(path, SlowExperts(parts, module))
        elif is_experts(module):
            with_dequantised(module, scheme)
    embedding, head = model.get_input_embeddings(), head_of(model)
    for path, linear in list(quantisable(model)):
        own = scheme_of(path, linear, scheme, linear is head)
        assert own is not None
        weight = linear.weight.detach()
        weight = weight if isinstance(linear, torch.nn.Linear) else weight.t()
        num_parts = num_ranks if path.endswith(SPLIT_INPUTS) else 1
        sources = [own.quantise(part) for part in weight.chunk(num_parts, dim=1)]
        if linear.weight is embedding.weight:
            embedding.weight = torch.nn.Parameter(sources[0].dequantised().to(weight.dtype))
        model.set_submodule(path, SlowLinear(sources, linear.bias))
    return model


def with_byte_inputs(model: Any, checkpoint: Checkpoint) -> Any:
    """A copy of the model with slow products of the checkpoint's integers, all that has some, with
    inputs of 8 bits. Experts: their gates and factors are of one kind."""
    model = copy.deepcopy(model)

    def read(name: str) -> QuantisedTensor:
        return checkpoint.read_quantised(name)[:].with_byte_inputs()

    for path, module in list(model.named_modules()):
        if is_experts(module):
            names = EXPERT_PARTS if module.has_gate else EXPERT_PARTS[1:]
            rows = [
                [read(expert_weight(path, i, part)) for part in names]
                for i in range(len(module.down_proj))
            ]
            gate_up = [QuantisedTensor.join(first) for *first, _ in rows]
            parts = [(gate_up, [down for *_, down in rows])]
            model.set_submodule(path, SlowExperts(parts, module))
        elif isinstance(module, torch.nn.Linear):
            stored = checkpoint.weights.get(f"{path}.weight")
            if stored is not None and stored.is_quantised:
                model.set_submodule(path, SlowLinear([read(f"{path}.weight")], module.bias))
    return model


@torch.inference_mode()
def furthest_behind(model: Any, prompt: list[int], generated: Sequence[int]) -> float:
    """How far the worst of these tokens is from being the model's first choice, in standard
    deviations of its logits; 0: all are."""
    tokens = list(generated)
    logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    behind = logits.amax(dim=1) - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return float(behind.max() / logits.std())
