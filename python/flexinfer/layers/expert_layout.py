"""ExpertLayout: how a module of transformers holds its experts, and what it computes with them.

| | Mixtral, Qwen, DeepSeek, ... | gpt-oss |
|---|---|---|
| the weights of an expert | [outputs, inputs] | [inputs, outputs] |
| gates and factors | first all gates, then all factors | in turns |
| biases | | of both products |
| what they become | silu(gate) * factor | a `ClampedGate` |

transformers' own module multiplies by any of several functions (`_experts_implementation`), which
compute the same for what the decorator says of the class; anything else that it may say is not
known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from flexinfer.layers.clamped_gate import ClampedGate
from flexinfer.layers.known import CLAMPED_EXPERTS, EXPERTS
from flexinfer.layers.mlp import is_silu
from flexinfer.layers.recognise import is_known

WIDTH_STEP = 16
"""Widths that the kernels write are multiples of it."""
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
SETTINGS = {"has_gate": True, "has_post_expert_norm": False, "_is_expert_parallel": False}
"""Of the decorator, whatever the layout."""
WEIGHTS = ("gate_up_proj", "down_proj")
BIASES = ("gate_up_proj_bias", "down_proj_bias")


class Sizes(NamedTuple):
    num_experts: int
    width: int
    hidden: int


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """Parameters are [experts, ...]; all that is told here is of one expert, in the order of
    `Experts`: rows are outputs, first of all gates, then of all factors."""

    code: tuple[str, ...]
    is_transposed: bool
    is_interleaved: bool
    has_bias: bool
    is_clamped: bool

    def is_of(self, module: Any) -> bool:
        """Whether the module's code is of this layout, and the decorator says nothing else."""
        if not is_known(module, self.code):
            return False
        settings = {
            **SETTINGS,
            "is_transposed": self.is_transposed,
            "is_concatenated": not self.is_interleaved,
            "has_bias": self.has_bias,
        }
        if any(getattr(module, name, value) != value for name, value in settings.items()):
            return False
        if self.is_clamped:
            return _clamped_gate(module) is not None
        gate = getattr(type(module), "_apply_gate", None)
        is_own_gate = gate is not None and gate.__module__ != "transformers.integrations.moe"
        return is_silu(module.act_fn) and not is_own_gate

    def sizes(self, module: Any) -> Sizes:
        num_experts, *shape = module.down_proj.shape
        width, hidden = reversed(shape) if self.is_transposed else shape
        return Sizes(num_experts, width, hidden)

    def gate(self, module: Any) -> ClampedGate | None:
        """None: silu."""
        return _clamped_gate(module) if self.is_clamped else None

    def weights(self, module: Any, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[2 * hidden, width] and [width, hidden]: views where they can be."""
        return self.in_order(*(getattr(module, name)[expert].detach() for name in WEIGHTS))

    def biases(self, module: Any, expert: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """[2 * hidden] and [width]; or none."""
        if not self.has_bias:
            return None, None
        gate_up, down = (getattr(module, name)[expert].detach() for name in BIASES)
        return self._gates_first(gate_up), down

    def in_order(
        self, gate_up: torch.Tensor, down: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`weights` of what the parameters hold."""
        if self.is_transposed:
            gate_up, down = gate_up.T, down.T
        return self._gates_first(gate_up), down

    def as_held(
        self, gate_up: torch.Tensor, down: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The reverse: what the parameters hold."""
        if self.is_interleaved:
            gate_up = torch.stack(gate_up.chunk(2), dim=1).flatten(0, 1)
        return (gate_up.T, down.T) if self.is_transposed else (gate_up, down)

    def _gates_first(self, outputs: torch.Tensor) -> torch.Tensor:
        return torch.cat([outputs[::2], outputs[1::2]]) if self.is_interleaved else outputs


LAYOUTS = (
    ExpertLayout(
        EXPERTS, is_transposed=False, is_interleaved=False, has_bias=False, is_clamped=False
    ),
    ExpertLayout(
        CLAMPED_EXPERTS, is_transposed=True, is_interleaved=True, has_bias=True, is_clamped=True
    ),
)


def layout_of(module: Any) -> ExpertLayout | None:
    """None: the module is no mixture of experts that `Experts` computes."""
    layout = next((layout for layout in LAYOUTS if layout.is_of(module)), None)
    if layout is None:
        return None
    config = getattr(module, "config", None)
    if getattr(config, "_experts_implementation", "eager") not in (None, *IMPLEMENTATIONS):
        return None
    _, width, hidden = layout.sizes(module)
    return None if width % WIDTH_STEP or hidden % WIDTH_STEP else layout


def _clamped_gate(module: Any) -> ClampedGate | None:
    """None: its numbers are none that can be computed with."""
    try:
        return ClampedGate(float(module.alpha), float(module.limit))
    except (TypeError, ValueError):
        return None
