"""Codebook: the numbers that weights of 4 bits stand for, where they do not lie evenly.

What is stored is a place in a table of 16 numbers. All are integers of a byte: a scale makes them
what they are, and kernels multiply bytes by them.
"""

from __future__ import annotations

from enum import Enum

import torch


class Codebook(Enum):
    """By what they are called; the values are the numbers, by their places."""

    E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
    """Twice the numbers of MXFP4: OCP Microscaling Formats (MX) Specification 1.0, 5.3.3."""
    IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
    """Of ggml's IQ4_NL and IQ4_XS, `kvalues_iq4nl` in ggml-common.h."""

    def look_up(self, integers: torch.Tensor) -> torch.Tensor:
        """int8 of the same shape: the numbers of places less 8, int8 from -8 to 7."""
        return torch.tensor(self.value, dtype=torch.int8)[integers.int() + 8]
