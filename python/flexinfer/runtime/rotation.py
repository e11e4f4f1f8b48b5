"""Rotations of the inputs of a product, before these become integers of 8 bits.

Of trained models a few inputs are a hundred times larger than the others, and one scale for all of
a token's would leave no bits to these. Times an orthogonal matrix H every number has its part of
all, and the product is the same: x W^T = (x H) (W H)^T (QuaRot, Ashkboos et al. 2024, section 4;
there the rotations are folded into a model's weights, here a layer has its own, whatever model it
is of). H is a Hadamard matrix, so that x H is sums and differences of pairs; of as many inputs as
the largest power of two that divides their number, one such block behind the other.
"""

from __future__ import annotations

import torch

from flexinfer import _kernels


def rotated_inputs(depth: int) -> int:
    """How many are rotated together."""
    return depth & -depth


def rotate(x: torch.Tensor) -> torch.Tensor:
    """float32 [rows, depth], on the CPU: each block of a row times the matrix of 1 and -1 in
    Sylvester's order. Twice it is x times `rotated_inputs`."""
    x = x.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    _kernels.rotate(x.data_ptr(), *x.shape)
    return x


def slow_rotate(x: torch.Tensor) -> torch.Tensor:
    """The definition: the same bits, of [..., depth]."""
    shape, block = x.shape, rotated_inputs(x.shape[-1])
    distance = 1
    while distance < block:
        pairs = x.float().reshape(-1, 2, distance)
        x = torch.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], dim=1)
        distance *= 2
    return x.float().reshape(shape)


def rotate_back(x: torch.Tensor) -> torch.Tensor:
    """What `rotate` made x of, up to rounding."""
    return rotate(x).div_(rotated_inputs(x.shape[1]))


def slow_rotate_inputs(x: torch.Tensor) -> torch.Tensor:
    """What weights that are rotated are multiplied with, as cpp/kernels/linear/inputs.h says, of
    [..., depth]: divided first, so that no sum overflows."""
    return slow_rotate(x.float() / rotated_inputs(x.shape[-1]))
