"""Codebook: the numbers that weights of 4 bits stand for, where they do not lie evenly.

What is stored is a place in a table of 16 numbers. All are integers of a byte: a scale makes them
what they are, and kernels multiply bytes by them. They multiply fastest where no two of them are
more than 129 apart.
"""

from __future__ import annotations

from enum import Enum

import torch


class Codebook(Enum):
    """A row is all that a further one needs: kernels take the numbers as they come."""

    E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), 1.0
    """Twice the numbers of MXFP4: OCP Microscaling Formats (MX) Specification 1.0, 5.3.3."""
    IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), 1.0
    """Of ggml's IQ4_NL and IQ4_XS, `kvalues_iq4nl` in ggml-common.h."""

    IQ3_S = (1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15), 1.0
    """Of ggml's, and the following: its grids have the magnitudes."""
    IQ3_XXS = (2, 6, 10, 14, 18, 22, 26, 31, -2, -6, -10, -14, -18, -22, -26, -31), 1 / 2
    IQ2 = (8, 25, 43, 0, 0, 0, 0, 0, -8, -25, -43, 0, 0, 0, 0, 0), 1 / 8
    """Of IQ2_XXS, IQ2_XS and IQ2_S."""
    IQ1 = (-7, 1, 9, 0, 0, 0, 0, 0, -9, -1, 7, 0, 0, 0, 0, 0), 1 / 8
    """Of IQ1_S and IQ1_M: -1, 0 and 1, an eighth more and an eighth less."""

    def __init__(self, numbers: tuple[int, ...], factor_unit: float) -> None:
        self.numbers = numbers
        """By their places."""
        self.factor_unit = factor_unit
        """A power of two, which factors of scales in two levels are multiplied with: in float16
        they may be too small to be."""

    def look_up(self, integers: torch.Tensor) -> torch.Tensor:
        """int8 of the same shape: the numbers of places less 8, int8 from -8 to 7."""
        return torch.tensor(self.numbers, dtype=torch.int8)[integers.int() + 8]
