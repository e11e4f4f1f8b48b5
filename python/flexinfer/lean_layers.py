"""Lean layers: parts of a transformers model replaced by ones that compute the same in fewer calls.

A layer is replaced only if its replacement gives the same result on random input, up to the
rounding of its dtype. What is not recognised stays as it is.

| layer | is recognised by | becomes |
|---|---|---|
| linear | type Linear or Conv1D, bfloat16 | `PackedLinear` |
| gated MLP | packed gate_proj, up_proj, down_proj; act_fn | `GatedMLP`: 3 calls instead of 5 |
| RMSNorm | one weight vector, an epsilon | `RMSNorm`: torch's |
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from flexinfer.packed_linear import PackedLinear, linear_pointwise, pack_linears

logger = logging.getLogger(__name__)

NUM_TRIAL_TOKENS = 3
ACTIVATIONS: dict[str, tuple[str, str]] = {
    "SiLU": ("swish", ""),
    "SiLUActivation": ("swish", ""),
    "GELU": ("gelu", "none"),
    "GELUActivation": ("gelu", "none"),
    "GELUTanh": ("gelu", "tanh"),
    "PytorchGELUTanh": ("gelu", "tanh"),
}
"""Class of the activation -> oneDNN's name and algorithm."""


class GatedMLP(torch.nn.Module):
    """down(act(gate(x)) * up(x)), activation and product inside the two matrix products."""

    def __init__(self, mlp: torch.nn.Module) -> None:
        super().__init__()
        self.gate_proj = _packed(mlp.gate_proj)
        self.up_proj = _packed(mlp.up_proj)
        self.down_proj = _packed(mlp.down_proj)
        self._act_fn = mlp.act_fn
        self._activation, self._algorithm = ACTIVATIONS[type(mlp.act_fn).__name__]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj, self.up_proj
        if torch.compiler.is_compiling():
            return self.down_proj(self._act_fn(gate(x)) * up(x))  # type: ignore[no-any-return,operator]
        gated = linear_pointwise(x, gate.weight, gate.bias, self._activation, [], self._algorithm)
        return self.down_proj(linear_pointwise(x, gated, up.weight, up.bias, "mul"))  # type: ignore[no-any-return]


class RMSNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in one call."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight.detach(), requires_grad=False)
        self.variance_epsilon = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(
            x, self.weight.shape, self.weight, self.variance_epsilon
        )


def make_lean(model: torch.nn.Module) -> None:
    """Replace what can be replaced. The model is not for training any more."""
    num_linears = pack_linears(model)
    num_mlps = _replace(model, _lean_mlp) if num_linears else 0
    num_norms = _replace(model, _lean_norm)
    logger.debug("packed %d linear layers, %d MLPs, %d norms", num_linears, num_mlps, num_norms)


def _replace(
    model: torch.nn.Module, lean: Callable[[torch.nn.Module], torch.nn.Module | None]
) -> int:
    """Replace each module for which `lean` gives one that computes the same."""
    num_replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            replacement = lean(child)
            if replacement is not None and not child._forward_hooks and same(child, replacement):
                setattr(parent, name, replacement)
                num_replaced += 1
    return num_replaced


@torch.inference_mode()
def same(module: torch.nn.Module, replacement: torch.nn.Module) -> bool:
    """Whether both give the same for random input, up to rounding."""
    width, dtype, device = _input_of(module)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, NUM_TRIAL_TOKENS, width, generator=generator).to(device, dtype)
    expected, output = module(x), replacement(x)
    if not isinstance(expected, torch.Tensor) or expected.shape != output.shape:
        return False
    tolerance = 20 * torch.finfo(dtype).eps * expected.abs().max().item()
    return expected.dtype == output.dtype and bool((expected - output).abs().max() <= tolerance)


def _input_of(module: torch.nn.Module) -> tuple[int, torch.dtype, torch.device]:
    """Width, dtype and device of a layer's input."""
    linear = getattr(module, "gate_proj", None)
    if linear is not None:
        return linear.in_features, linear.weight.dtype, linear.weight.device
    weight = next(module.parameters())
    return weight.shape[0], weight.dtype, weight.device


def _packed(module: torch.nn.Module | torch.Tensor) -> PackedLinear:
    assert isinstance(module, PackedLinear)
    return module


def _lean_mlp(module: torch.nn.Module) -> torch.nn.Module | None:
    """REQUIRES: the linear layers are packed."""
    children = dict(module.named_children())
    linears = [children.pop(name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    activation = children.pop("act_fn", None)
    is_known = type(activation).__name__ in ACTIVATIONS and not children
    if not is_known or not all(isinstance(linear, PackedLinear) for linear in linears):
        return None
    return GatedMLP(module)


def _lean_norm(module: torch.nn.Module) -> torch.nn.Module | None:
    parameters = list(module.parameters())
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or len(parameters) != 1 or eps is None:
        return None
    weight = parameters[0]
    if weight.device.type == "meta" or weight.dim() != 1 or isinstance(module, RMSNorm):
        return None
    return RMSNorm(weight, eps)
