"""Norm and rotary embedding as operators of torch, for compiled models.

A compiled model calls them where an eager one calls the functions behind them, and the compiler
does not look into them: with its own code for norms and rotary embeddings models took longer in
bfloat16 (docs/cpu_performance.md). As products are operators anyway (`linear.py`), it has little to
fuse. Modules that call them in a graph `register` them when they are made.
"""

from __future__ import annotations

from functools import cache

import torch

from flexinfer.layers import rows as row_ops
from flexinfer.runtime.torch_operators import define_operators


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`row_ops.rms_norm`, in a graph."""
    output: torch.Tensor = torch.ops.flexinfer.rms_norm(x, weight, eps)
    return output


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`row_ops.rotate`, in a graph."""
    output: torch.Tensor = torch.ops.flexinfer.rotate(x, cos, sin)
    return output


@cache
def register() -> torch.library.Library:
    """Make the operators known to torch; once a process."""
    return define_operators(
        (
            "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
            row_ops.rms_norm,
            _rms_norm_shape,
        ),
        ("rotate(Tensor x, Tensor cos, Tensor sin) -> Tensor", row_ops.rotate, _rotate_shape),
    )


def _rms_norm_shape(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape)


def _rotate_shape(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    batch, num_heads, num_tokens, width = x.shape
    return x.new_empty(batch, num_tokens, num_heads, width).transpose(1, 2)
