"""QuantisedEmbedding: an embedding whose rows stay quantised until they are looked up."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flexinfer.layers.quantised import QuantisedTensor


class QuantisedEmbedding(torch.nn.Module):
    """ids [...] -> [..., width]. Not for training."""

    def __init__(
        self,
        rows_of: Callable[[torch.Tensor], QuantisedTensor],
        dtype: torch.dtype,
        scale: torch.Tensor | None = None,
        nbytes: int = 0,
    ) -> None:
        """rows_of: of token ids, int64 [n]; dtype: of the output; scale: of one number, times which
        a row is in that dtype; None: 1. nbytes: of the rows, where nothing else holds them."""
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
        """Of no numbers: transformers asks a model's first parameter for its dtype, and of some
        there is no other."""
        self.nbytes = nbytes
        self._rows_of = rows_of
        self._scale = None if scale is None else scale.to(dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self._rows_of(ids.reshape(-1)).dequantised().to(self.weight.dtype)
        rows = rows.view(*ids.shape, rows.shape[1])
        return rows if self._scale is None else rows * self._scale
