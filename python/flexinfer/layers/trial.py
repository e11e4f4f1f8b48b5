"""The second check of a replacement: it gives what the module gives, for random input.

The first is the module's code (`recognise.py`). A trial finds what code does not show: a weight of
another shape than the layer says, a kernel that is wrong on this CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NUM_TRIAL_TOKENS = 3
SCALES = {torch.float32: (1.0, 1e3), torch.bfloat16: (1.0, 1e3), torch.float16: (1.0,)}
"""Of the input. The larger one reaches what only large numbers do; in float16 it overflows."""
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Largest difference, as a share of the result: both are root mean squares."""
NOT_OF_THIS_KIND = (TypeError, ValueError, RuntimeError, AttributeError, KeyError)
"""What a module raises that is called in another way than it wants."""

Run = Callable[[torch.nn.Module, torch.Tensor], Any]
"""(module, x [1, NUM_TRIAL_TOKENS, width]) -> its output."""


@torch.inference_mode()
def computes_the_same(
    module: torch.nn.Module,
    replacement: torch.nn.Module,
    width: int,
    dtype: torch.dtype,
    run: Run = lambda module, x: module(x),
) -> bool:
    """Whether both give the same, up to rounding. width: of their input."""
    generator = torch.Generator().manual_seed(0)
    for scale in SCALES[dtype]:
        x = scale * torch.randn(1, NUM_TRIAL_TOKENS, width, generator=generator)
        x = x.to(dtype)
        try:
            expected, output = run(module, x), run(replacement, x)
        except NOT_OF_THIS_KIND:
            return False
        if not isinstance(expected, torch.Tensor) or expected.shape != output.shape:
            return False
        difference = (output.float() - expected.float()).norm()
        if expected.dtype != output.dtype or not bool(
            difference <= TOLERANCES[dtype] * expected.float().norm()
        ):
            return False
    return True
