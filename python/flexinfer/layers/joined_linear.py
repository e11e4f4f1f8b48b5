"""JoinedLinear: linear layers of one input whose weights lie in different formats."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexinfer.layers.linear import Linear, OpaqueLinear


class JoinedLinear(OpaqueLinear):
    """x [..., in_features] -> their outputs, one after the other, as of a single layer.

    A file that is quantised by types of several widths (Q4_K_M) has queries and keys of 4 bits
    beside values of 6, which one product cannot read.
    """

    def __init__(self, layers: Sequence[Linear]) -> None:
        widths = [layer.out_features for layer in layers]
        super().__init__(torch.empty(sum(widths), layers[0].in_features, device="meta"), None)
        self.layers = torch.nn.ModuleList(layers)
        self._widths = widths
        self.weight = layers[0].weight

    @property
    def parts(self) -> list[Linear]:
        return [part for part in self.layers if isinstance(part, Linear)]

    def multiply(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """residual + x weight^T + bias."""
        if residual is None:
            return torch.cat([layer(x) for layer in self.layers], dim=-1)
        residuals = residual.split(self._widths, dim=-1)  # type: ignore[no-untyped-call]
        pairs = zip(self.layers, residuals, strict=True)
        return torch.cat([layer(x, part) for layer, part in pairs], dim=-1)
