"""ScaleLevels: scales of groups in two levels, as GGUF's K-quants have them.

A scale is a byte times a float16 factor for all groups of a block of 256 inputs: 8 bits a group and
16 a block, where the product would need float32. It is exact there: 8 and 11 bits make 19.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from flexinfer.runtime.kernels import SCALE_BLOCK


class ScaleLevels(NamedTuple):
    """Numbers of a weight's groups, each a byte times a factor."""

    integers: torch.Tensor
    """int8 [columns, groups]"""
    factors: torch.Tensor
    """float16 [columns, blocks]"""

    def products(self) -> torch.Tensor:
        """float32 [columns, groups]: the numbers."""
        groups = torch.unflatten(self.integers, 1, (self.factors.shape[1], -1))
        return (groups * self.factors.float()[:, :, None]).flatten(1)

    def of_outputs(self, rows: slice | torch.Tensor) -> ScaleLevels:
        """Those of some outputs: views, of a slice."""
        return ScaleLevels(self.integers[rows], self.factors[rows])

    def repeated(self, times: int) -> ScaleLevels:
        """For groups of so many times fewer inputs."""
        return self._replace(integers=self.integers.repeat_interleave(times, dim=1))

    def of_inputs(self, groups: torch.Tensor, blocks: torch.Tensor) -> ScaleLevels:
        """For inputs in another order: for each group and block which of these it is."""
        return ScaleLevels(self.integers[:, groups], self.factors[:, blocks])

    @classmethod
    def join(cls, levels: Sequence[ScaleLevels]) -> ScaleLevels:
        """One after the other."""
        return cls(torch.cat([n.integers for n in levels]), torch.cat([n.factors for n in levels]))

    def check(self, columns: int, depth: int, group: int) -> None:
        """Raises ValueError where they are not those of a weight [columns, depth]."""
        if group == 0 or depth % SCALE_BLOCK or SCALE_BLOCK % group:
            raise ValueError(
                f"scales in two levels need inputs that are a multiple of {SCALE_BLOCK} and groups "
                f"that divide {SCALE_BLOCK}, got {depth} and {group}"
            )
        wanted = torch.Size((columns, depth // group)), torch.Size((columns, depth // SCALE_BLOCK))
        found = self.integers.shape, self.factors.shape
        dtypes = self.integers.dtype, self.factors.dtype
        if found != wanted or dtypes != (torch.int8, torch.float16):
            raise ValueError(
                f"scales in two levels for groups of {group} of a weight {[columns, depth]} are "
                f"int8 {list(wanted[0])} and float16 {list(wanted[1])}, got {dtypes[0]} "
                f"{list(found[0])} and {dtypes[1]} {list(found[1])}"
            )
