"""Lean rotary embedding: what a transformers attention module calls by name, in one pass each for
queries and keys, where the kernel can; for the modules that stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch

from flexinfer.layers import rows as row_ops

NUM_TRIAL_TOKENS = 3
ROTARY_FUNCTION = "apply_rotary_pos_emb"

Rotary = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""(q, k [1, heads, tokens, dim], cos, sin [1, tokens, dim]) -> q, k rotated."""


def plain_rotary(module: torch.nn.Module) -> Rotary | None:
    """The rotary embedding that this module's forward calls by its name."""
    forward: Any = type(module).forward
    if not isinstance(forward, FunctionType) or ROTARY_FUNCTION not in forward.__code__.co_names:
        return None
    found: Rotary | None = forward.__globals__.get(ROTARY_FUNCTION)
    return found


def make_rotary_lean(module: torch.nn.Module) -> bool:
    """Have this attention module, and no other of its class, call the lean rotary embedding.

    transformers' attention modules call a function of their file by its name; the module gets its
    forward with another function under that name.
    """
    plain, forward = plain_rotary(module), type(module).forward
    head_dim = getattr(module, "head_dim", None)
    weights = (getattr(child, "weight", None) for child in module.children())
    weight = next((weight for weight in weights if isinstance(weight, torch.Tensor)), None)
    if plain is None or not isinstance(head_dim, int) or weight is None or head_dim % 2:
        return False
    lean = lean_rotary(plain)
    can_run = row_ops.supports(weight.dtype, weight.device, head_dim // 2)
    if not can_run or not same_rotary(plain, lean, head_dim, weight.dtype):
        return False
    names = {**forward.__globals__, ROTARY_FUNCTION: lean}
    copy = FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(copy, module)
    return True


def lean_rotary(plain: Rotary) -> Rotary:
    """`plain` for what the kernel does not take and in compiled models, else the kernel."""

    def rotary(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        is_known = q.shape[0] == 1 and cos.shape == (1, q.shape[2], q.shape[3]) and not args
        if torch.compiler.is_compiling() or not is_known or not q.dtype == k.dtype == cos.dtype:
            return plain(q, k, cos, sin, *args)
        return row_ops.rotate(q, cos, sin), row_ops.rotate(k, cos, sin)

    return rotary


@torch.inference_mode()
def same_rotary(plain: Rotary, lean: Rotary, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether both rotate alike, for random angles and vectors, up to rounding."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 2, NUM_TRIAL_TOKENS, head_dim, generator=generator).to(dtype)
    angles = torch.randn(1, NUM_TRIAL_TOKENS, head_dim // 2, generator=generator).repeat(1, 1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    try:
        expected = plain(q, k, cos, sin)
    except (TypeError, ValueError, RuntimeError):
        return False  # a function of the same name for something else
    tolerance = 20 * torch.finfo(dtype).eps
    pairs = zip(expected, lean(q, k, cos, sin), strict=True)
    return all(a.shape == b.shape and bool((a - b).abs().max() <= tolerance) for a, b in pairs)
