"""What takes the place of transformers' experts: `Experts`, over plain weights, weights that are
quantised at load, or the integers of a checkpoint.

    is_experts    is the code known, with all that its decorator may change
    reader_of     where the weights come from, an expert at a time: parameters, or a checkpoint
    lay_out       the experts one after the other in their last form

transformers' own module multiplies by any of several functions (`_experts_implementation`), which
compute the same for what the decorator says of the class; anything else that it may say is not
known here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from flexinfer.layers import host_linear
from flexinfer.layers.expert_weights import ExpertWeights
from flexinfer.layers.experts import Experts, Weight, slow_experts
from flexinfer.layers.known import EXPERTS
from flexinfer.layers.mlp import is_silu
from flexinfer.layers.quantised import QuantisedTensor, Scheme
from flexinfer.layers.recognise import is_known
from flexinfer.layers.trial import computes_the_same

WIDTH_STEP = 16
"""Widths that the kernels write are multiples of it."""
NUM_TRIAL_EXPERTS = 2
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
SETTINGS = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": False,
    "is_concatenated": True,
    "_is_expert_parallel": False,
}

Reader = Callable[[int], tuple[list[Weight], Weight]]
"""(expert) -> its gates and factors, in one weight [2 * hidden, width] or one each, and what its
outputs are made with [width, hidden]."""


def is_experts(module: Any) -> bool:
    """Whether the module is a mixture of experts that `Experts` computes."""
    if not is_known(module, EXPERTS) or not is_silu(module.act_fn):
        return False
    if any(getattr(module, name, value) != value for name, value in SETTINGS.items()):
        return False
    gate = getattr(type(module), "_apply_gate", None)
    if gate is not None and gate.__module__ != "transformers.integrations.moe":
        return False
    config = getattr(module, "config", None)
    if getattr(config, "_experts_implementation", "eager") not in (None, *IMPLEMENTATIONS):
        return False
    return not any(size % WIDTH_STEP for size in module.down_proj.shape[1:])


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
    return lambda expert: (
        [module.gate_up_proj[expert].detach()],
        module.down_proj[expert].detach(),
    )


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
        if any(isinstance(part, QuantisedTensor) for part in (*parts, down)):
            return True
    weights = [
        torch.empty(p.shape[1:], dtype=p.dtype) for p in (module.gate_up_proj, module.down_proj)
    ]
    return all(map(host_linear.supports, weights))


def lay_out(module: Any, scheme: Scheme | None) -> Experts:
    """The experts in their last form: with the integers of their checkpoint, or quantised by the
    scheme, or as they are. One is held at a time."""
    read, dtype = reader_of(module), module.down_proj.dtype
    num_experts = module.down_proj.shape[0]
    gate_up: list[ExpertWeights] = []
    down = ExpertWeights(num_experts)
    for expert in range(num_experts):
        first, last = read(expert)
        parts = _join([_in_form(part, scheme) for part in first])
        gate_up = gate_up or [ExpertWeights(num_experts) for _ in parts]
        for table, part in zip(gate_up, parts, strict=True):
            table.add(part)
        down.add(_in_form(last, scheme))
    return Experts(gate_up, down, dtype)


def lay_out_if_the_same(module: Any, scheme: Scheme | None) -> Experts | None:
    """As `lay_out`, where the module computes what experts should on numbers as of its first ones.
    None: it does not."""
    few, (gate_up, down) = _first_experts(module)

    class Slow(torch.nn.Module):
        def forward(self, x: torch.Tensor, index: Any, weights: Any) -> torch.Tensor:
            return slow_experts(gate_up, down, x, index, weights)

    width, dtype = module.down_proj.shape[1], module.down_proj.dtype
    is_same = computes_the_same(few, Slow(), width, dtype, run_experts)
    return lay_out(module, scheme) if is_same else None


def read_all(module: Any) -> None:
    """Read the weights that `store` noted into the module's parameters, as its own code wants."""
    read, dtype = reader_of(module), module.down_proj.dtype
    gate_up = torch.empty(module.gate_up_proj.shape, dtype=dtype)
    down = torch.empty(module.down_proj.shape, dtype=dtype)
    for expert in range(len(down)):
        first, last = read(expert)
        gate_up[expert] = torch.cat([_plain(part, dtype) for part in first])
        down[expert] = _plain(last, dtype)
    module.gate_up_proj = torch.nn.Parameter(gate_up, requires_grad=False)
    module.down_proj = torch.nn.Parameter(down, requires_grad=False)
    del module.stored_experts


def run_experts(module: Any, x: torch.Tensor) -> torch.Tensor:
    """A trial of experts: x [1, tokens, width], each token by all that two have in common."""
    tokens = x.shape[1]
    index = (torch.arange(tokens)[:, None] + torch.arange(2)) % NUM_TRIAL_EXPERTS
    weights = torch.linspace(0.2, 0.8, 2 * tokens).view(tokens, 2).to(x.dtype)
    return module(x[0], index, weights)  # type: ignore[no-any-return]


def _first_experts(module: Any) -> tuple[Any, tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """The module with its first experts alone, and their weights."""
    read, dtype = reader_of(module), module.down_proj.dtype
    count = min(NUM_TRIAL_EXPERTS, module.down_proj.shape[0])
    pairs = [read(expert) for expert in range(count)]
    gate_up = [torch.cat([_plain(part, dtype) for part in first]) for first, _ in pairs]
    down = [_plain(last, dtype) for _, last in pairs]
    few = copy.copy(module)
    few._parameters = {}
    few.num_experts = count
    few.gate_up_proj = torch.nn.Parameter(torch.stack(gate_up), requires_grad=False)
    few.down_proj = torch.nn.Parameter(torch.stack(down), requires_grad=False)
    return few, (gate_up, down)


def _in_form(weight: Weight, scheme: Scheme | None) -> Weight:
    if isinstance(weight, QuantisedTensor) or scheme is None:
        return weight
    return scheme.quantise(weight)


def _join(parts: list[Weight]) -> list[Weight]:
    """Gates and factors as one weight, where one product can read both."""
    if len(parts) == 1:
        return parts
    sources = [part for part in parts if isinstance(part, QuantisedTensor)]
    if not sources:
        return [torch.cat([part for part in parts if isinstance(part, torch.Tensor)])]
    forms = {replace(source, minimums=None).kind for source in sources}
    if len(forms) > 1:
        return parts
    if any(source.minimums is not None for source in sources):
        sources = [
            replace(s, minimums=torch.zeros_like(s.scales) if s.minimums is None else s.minimums)
            for s in sources
        ]
    return [QuantisedTensor.join(sources)]


def _plain(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    return weight.dequantised_to(dtype) if isinstance(weight, QuantisedTensor) else weight
