"""Lean layers: parts of a transformers model replaced by ones that compute the same in fewer calls.

A part is replaced only if its replacement gives the same result on random input, up to the rounding
of its dtype. What is not recognised stays as it is; so does everything on a GPU.

| part | is recognised by | becomes |
|---|---|---|
| attention | q_proj, k_proj, v_proj, o_proj; what reaches the attention | `LeanAttention` |
| linear | type Linear or Conv1D; bfloat16, or float32 in panels | `PanelLinear`, `PackedLinear` |
| gated MLP | packed gate_proj, up_proj, down_proj; act_fn | `PackedGatedMLP`: 3 calls for 5 |
| gated MLP | gate_proj, up_proj, down_proj; SiLU; not oneDNN's alone | `GatedMLP`: 3 calls for 5 |
| RMSNorm | one weight vector, an epsilon | `RMSNorm`: 1 call for 6 |
| decoder layer | two norms, lean attention and MLP | `LeanDecoderLayer`: no additions |
| rotary embedding | attention calls apply_rotary_pos_emb | `row_ops.rotate`: 2 calls for 14 |

In a compiled model they are operators that the compiler does not look into (`lean_operators`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from flexinfer.layers import operators as lean_operators
from flexinfer.layers import rows as row_ops
from flexinfer.layers.attention import lean_attention
from flexinfer.layers.decoder import lean_decoder_layer
from flexinfer.layers.mlp import lean_mlp
from flexinfer.layers.pack import pack_linears, parents
from flexinfer.layers.rotary import NUM_TRIAL_TOKENS, make_rotary_lean
from flexinfer.runtime.weight_files import drop_pages

logger = logging.getLogger(__name__)

Lean = Callable[[torch.nn.Module], torch.nn.Module | None]
"""What may take a module's place; None: it stays."""


class RMSNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in one call."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        lean_operators.register()
        self.weight = torch.nn.Parameter(weight.detach().contiguous(), requires_grad=False)
        self.variance_epsilon = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self.weight.dtype:
            return torch.nn.functional.rms_norm(
                x, self.weight.shape, self.weight, self.variance_epsilon
            )
        if torch.compiler.is_compiling():
            return lean_operators.rms_norm(x, self.weight, self.variance_epsilon)
        return row_ops.rms_norm(x, self.weight, self.variance_epsilon)


def make_lean(model: torch.nn.Module) -> None:
    """Replace what can be replaced. The model is not for training any more."""
    counts = {
        "attention": _replace(model, lean_attention),
        "mlp": _replace(model, _checked(lean_mlp)),
        "linear": pack_linears(model),
        "packed mlp": _replace(model, _checked(lean_mlp)),
        "norm": _replace(model, _checked(_lean_norm)),
        "layer": _replace(model, lean_decoder_layer),
        "rotary": sum(make_rotary_lean(module) for module in model.modules()),
    }
    logger.debug("lean layers: %s", counts)


def _replace(model: torch.nn.Module, lean: Lean) -> int:
    """Replace each module for which `lean` gives one that computes the same."""
    num_replaced = 0
    for parent in parents(model):
        for name, child in list(parent.named_children()):
            if child._forward_hooks or child._forward_pre_hooks:
                continue
            replacement = lean(child)
            if replacement is not None:
                setattr(parent, name, replacement)
                kept = {weight.data_ptr() for weight in replacement.parameters()}
                drop_pages(w for w in child.parameters() if w.data_ptr() not in kept)
                num_replaced += 1
    return num_replaced


def _checked(lean: Lean) -> Lean:
    """`lean`, for modules that are functions of one tensor, with the check that both are."""

    def checked(module: torch.nn.Module) -> torch.nn.Module | None:
        replacement = lean(module)
        return replacement if replacement is not None and same(module, replacement) else None

    return checked


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


def _lean_norm(module: torch.nn.Module) -> torch.nn.Module | None:
    parameters = list(module.parameters())
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or len(parameters) != 1 or eps is None:
        return None
    weight = parameters[0]
    if weight.device.type == "meta" or weight.dim() != 1 or isinstance(module, RMSNorm):
        return None
    can_run = row_ops.supports(weight.dtype, weight.device, weight.shape[0])
    return RMSNorm(weight, eps) if can_run else None
