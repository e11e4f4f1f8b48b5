"""What takes the place of transformers' experts: `Experts`, over plain weights, weights that are
quantised at load, or the integers of a checkpoint.

    is_experts    is the code known, with all that its decorator may change (`expert_layout.py`)
    reader_of     where the weights come from, an expert at a time: parameters, or a checkpoint
    lay_out       the experts one after the other in their last form

Biases are parameters of the module in either case: they are small.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from flexinfer.layers import host_linear
from flexinfer.layers.activation import Activation
from flexinfer.layers.expert_layout import BIASES, ExpertLayout, layout_of
from flexinfer.layers.expert_weights import ExpertWeights, Weight
from flexinfer.layers.experts import Experts, slow_experts
from flexinfer.layers.quantised import QuantisedTensor, QuantisedWeight, Scheme
from flexinfer.layers.quantised_rows import join
from flexinfer.layers.trial import computes_the_same

NUM_TRIAL_EXPERTS = 2

Reader = Callable[[int], tuple[list[Weight], Weight]]
"""(expert) -> its gates and factors, in one weight [2 * hidden, width] or one each (without gates
its factors [hidden, width]), and what its outputs are made with [width, hidden]."""


def is_experts(module: Any) -> bool:
    """Whether the module is a mixture of experts that `Experts` computes."""
    return layout_of(module) is not None


def store(module: Any, reader: Reader) -> None:
    """Note where the weights of the experts are, which the module has not got."""
    module.stored_experts = reader


def is_stored(module: Any) -> bool:
    return hasattr(module, "stored_experts")


def reader_of(module: Any) -> Reader:
    """What `store` noted, or the module's parameters."""
    reader: Reader | None = getattr(module, "stored_experts", None)
    if reader is not None:
        return reader
    layout = _layout_of(module)

    def read(expert: int) -> tuple[list[Weight], Weight]:
        first, down = layout.weights(module, expert)
        return [first], down

    return read


def fuse_experts(module: Any) -> Experts | None:
    """What may take the module's place with weights as they are; None: it is of another kind, or
    the kernel is not faster here."""
    if not is_experts(module) or not is_for_kernel(module, None):
        return None
    return lay_out(module, None)


def is_for_kernel(module: Any, scheme: Scheme | None) -> bool:
    """Whether the weights are quantised or to be, or the kernel for plain ones is faster than
    transformers' functions here."""
    if scheme is not None:
        return True
    if is_stored(module):
        parts, down = module.stored_experts(0)
        if any(isinstance(part, QuantisedWeight) for part in (*parts, down)):
            return True
    layout, dtype = _layout_of(module), module.down_proj.dtype
    _, width, hidden = layout.sizes(module)
    shapes = ((2 if layout.has_gates else 1) * hidden, width), (width, hidden)
    return all(host_linear.supports(torch.empty(shape, dtype=dtype)) for shape in shapes)


def lay_out(module: Any, scheme: Scheme | None) -> Experts:
    """The experts in their last form: with the integers of their checkpoint, or quantised by the
    scheme, or as they are. One is held at a time."""
    layout, read, dtype = _layout_of(module), reader_of(module), module.down_proj.dtype
    num_experts = layout.sizes(module).num_experts
    gate_up: list[ExpertWeights] = []
    down = ExpertWeights(num_experts)
    for expert in range(num_experts):
        first, last = read(expert)
        bias, last_bias = layout.biases(module, expert)
        parts = _join([_in_form(part, scheme) for part in first])
        gate_up = gate_up or [ExpertWeights(num_experts) for _ in parts]
        biases = [None] * len(parts) if bias is None else bias.chunk(len(parts))
        for table, part, own in zip(gate_up, parts, biases, strict=True):
            table.add(part, own)
        down.add(_in_form(last, scheme), last_bias)
    return Experts(gate_up, down, dtype, layout.activation(module))


def lay_out_if_the_same(module: Any, scheme: Scheme | None) -> Experts | None:
    """As `lay_out`, where the module computes what experts should on numbers as of its first ones.
    None: it does not."""
    layout = _layout_of(module)
    few, gate_up, down = _first_experts(module, layout)
    first, last = zip(*(layout.biases(few, expert) for expert in range(len(down))), strict=True)
    slow = _SlowExperts((gate_up, down), (first, last), layout.activation(module))
    width, dtype = layout.sizes(module).width, module.down_proj.dtype
    is_same = computes_the_same(few, slow, width, dtype, run_experts)
    return lay_out(module, scheme) if is_same else None


class _SlowExperts(torch.nn.Module):
    def __init__(self, products: Any, biases: Any, activation: Activation) -> None:
        super().__init__()
        self._products, self._biases, self._activation = products, biases, activation

    def forward(self, x: torch.Tensor, index: Any, weights: Any) -> torch.Tensor:
        gate_up, down = self._products
        return slow_experts(gate_up, down, x, index, weights, self._biases, self._activation)


def read_all(module: Any) -> None:
    """Read the weights that `store` noted into the module's parameters, as its own code wants."""
    layout, read, dtype = _layout_of(module), reader_of(module), module.down_proj.dtype
    held = {
        name: torch.empty(getattr(module, name).shape, dtype=dtype) for name in layout.weight_names
    }
    for expert in range(layout.sizes(module).num_experts):
        first, last = read(expert)
        weight = torch.cat([_plain(part, dtype) for part in first])
        own = layout.as_held(weight, _plain(last, dtype))
        for all_of_them, one in zip(held.values(), own, strict=True):
            all_of_them[expert] = one
    for name, all_of_them in held.items():
        setattr(module, name, torch.nn.Parameter(all_of_them, requires_grad=False))
    del module.stored_experts


def run_experts(module: Any, x: torch.Tensor) -> torch.Tensor:
    """A trial of experts: x [1, tokens, width], each token by all that two have in common."""
    tokens = x.shape[1]
    index = (torch.arange(tokens)[:, None] + torch.arange(2)) % NUM_TRIAL_EXPERTS
    weights = torch.linspace(0.2, 0.8, 2 * tokens).view(tokens, 2).to(x.dtype)
    return module(x[0], index, weights)  # type: ignore[no-any-return]


def _layout_of(module: Any) -> ExpertLayout:
    """REQUIRES `is_experts`."""
    layout = layout_of(module)
    assert layout is not None
    return layout


def _first_experts(
    module: Any, layout: ExpertLayout
) -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
    """The module with its first experts alone, and their weights."""
    read, dtype = reader_of(module), module.down_proj.dtype
    count = min(NUM_TRIAL_EXPERTS, layout.sizes(module).num_experts)
    pairs = [read(expert) for expert in range(count)]
    gate_up = [torch.cat([_plain(part, dtype) for part in first]) for first, _ in pairs]
    down = [_plain(last, dtype) for _, last in pairs]
    few = copy.copy(module)
    few._parameters = {}
    few.num_experts = count
    held = [layout.as_held(*pair) for pair in zip(gate_up, down, strict=True)]
    for name, weights in zip(layout.weight_names, zip(*held, strict=True), strict=True):
        setattr(few, name, torch.nn.Parameter(torch.stack(weights), requires_grad=False))
    for name in BIASES if layout.has_bias else ():
        bias = getattr(module, name)[:count].detach()
        setattr(few, name, torch.nn.Parameter(bias, requires_grad=False))
    return few, gate_up, down


def _in_form(weight: Weight, scheme: Scheme | None) -> Weight:
    if isinstance(weight, QuantisedWeight) or scheme is None:
        return weight
    return scheme.quantise(weight)


def _join(parts: list[Weight]) -> list[Weight]:
    """Gates and factors as one weight, where one product can read both."""
    if len(parts) == 1:
        return parts
    sources = [part for part in parts if isinstance(part, QuantisedWeight)]
    if not sources:
        return [torch.cat([part for part in parts if isinstance(part, torch.Tensor)])]
    if len({source.kind._replace(has_minimums=False) for source in sources}) > 1:
        return parts
    if len({source.kind.has_minimums for source in sources}) > 1:
        return [join([_with_minimums(source[:]) for source in sources])]
    return [join(sources)]


def _with_minimums(source: QuantisedTensor) -> QuantisedTensor:
    if source.minimums is not None:
        return source
    return replace(source, minimums=torch.zeros_like(source.scales))


def _plain(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    return weight.dequantised_to(dtype) if isinstance(weight, QuantisedWeight) else weight
