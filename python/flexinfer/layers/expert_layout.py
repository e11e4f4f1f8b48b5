"""ExpertLayout: how a module of transformers holds its experts, and what it computes with them.

| | Mixtral, Qwen, Gemma 4, ... | gpt-oss | Nemotron-H |
|---|---|---|---|
| the weights of an expert | [outputs, inputs] | [inputs, outputs] | [outputs, inputs] |
| gates and factors | first all gates, then all factors | in turns | factors alone |
| biases | | of both products | |
| `Activation` | SILU, GELU_TANH | CLAMPED_SWIGLU | RELU2 |

transformers' own module multiplies by any of several functions (`_experts_implementation`), which
compute the same for what the decorator says of the class; anything else that it may say is not
known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from flexinfer.layers.activation import Activation, activation_of, clamped_swiglu
from flexinfer.layers.known import CLAMPED_EXPERTS, EXPERTS, EXPERTS_WITHOUT_GATES
from flexinfer.layers.recognise import is_known

WIDTH_STEP = 16
"""Widths that the kernels write are multiples of it."""
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
SETTINGS = {"has_post_expert_norm": False, "_is_expert_parallel": False}
"""Of the decorator, whatever the layout."""
BIASES = ("gate_up_proj_bias", "down_proj_bias")


class Sizes(NamedTuple):
    num_experts: int
    width: int
    hidden: int


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """Parameters are [experts, ...]; all that is told here is of one expert, in the order of
    `Experts`: rows are outputs, first of all gates, then of all factors. `first` is how many there
    are of the first product: 2 * hidden, or hidden without gates."""

    code: tuple[str, ...]
    has_gates: bool = True
    is_transposed: bool = False
    is_interleaved: bool = False
    has_bias: bool = False
    is_clamped: bool = False

    def is_of(self, module: Any) -> bool:
        """Whether the module's code is of this layout, and the decorator says nothing else."""
        if not is_known(module, self.code):
            return False
        settings = {
            **SETTINGS,
            "has_gate": self.has_gates,
            "is_transposed": self.is_transposed,
            "is_concatenated": not self.is_interleaved,
            "has_bias": self.has_bias,
        }
        if any(getattr(module, name, value) != value for name, value in settings.items()):
            return False
        return self._activation(module) is not None

    def sizes(self, module: Any) -> Sizes:
        num_experts, *shape = module.down_proj.shape
        width, hidden = reversed(shape) if self.is_transposed else shape
        return Sizes(num_experts, width, hidden)

    @property
    def weight_names(self) -> tuple[str, str]:
        """Of the parameters of both products."""
        return ("gate_up_proj" if self.has_gates else "up_proj"), "down_proj"

    def activation(self, module: Any) -> Activation:
        """REQUIRES `is_of`."""
        activation = self._activation(module)
        assert activation is not None
        return activation

    def _activation(self, module: Any) -> Activation | None:
        """None: of another kind, or its numbers are none that can be computed with."""
        if self.is_clamped:
            try:
                return clamped_swiglu(float(module.alpha), float(module.limit))
            except (TypeError, ValueError):
                return None
        gate = getattr(type(module), "_apply_gate", None)
        if gate is not None and gate.__module__ != "transformers.integrations.moe":
            return None
        activation = activation_of(module.act_fn)
        fits = activation is not None and activation.has_gates == self.has_gates
        return activation if fits else None

    def weights(self, module: Any, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[first, width] and [width, hidden]: views where they can be."""
        first, down = (getattr(module, name)[expert].detach() for name in self.weight_names)
        return self.in_order(first, down)

    def biases(self, module: Any, expert: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """[first] and [width]; or none."""
        if not self.has_bias:
            return None, None
        gate_up, down = (getattr(module, name)[expert].detach() for name in BIASES)
        return self._gates_first(gate_up), down

    def in_order(
        self, first: torch.Tensor, down: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`weights` of what the parameters hold."""
        if self.is_transposed:
            first, down = first.T, down.T
        return self._gates_first(first), down

    def as_held(self, first: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The reverse: what the parameters hold."""
        if self.is_interleaved:
            first = torch.stack(first.chunk(2), dim=1).flatten(0, 1)
        return (first.T, down.T) if self.is_transposed else (first, down)

    def _gates_first(self, outputs: torch.Tensor) -> torch.Tensor:
        return torch.cat([outputs[::2], outputs[1::2]]) if self.is_interleaved else outputs


LAYOUTS = (
    ExpertLayout(EXPERTS),
    ExpertLayout(EXPERTS_WITHOUT_GATES, has_gates=False),
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
