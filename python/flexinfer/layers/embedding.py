"""QuantisedEmbedding: an embedding whose rows stay as a file has them until they are looked up."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flexinfer.layers.quantised import QuantisedTensor


class QuantisedEmbedding(torch.nn.Module):
    """ids [...] -> [..., width]. Not for training."""

    def __init__(
        self,
        rows: torch.Tensor,
        decode: Callable[[torch.Tensor], QuantisedTensor],
        dtype: torch.dtype,
    ) -> None:
        """rows: uint8 [vocabulary, bytes]; decode: what some of them are; dtype: of the output."""
        super().__init__()
        self._rows, self._decode, self._dtype = rows, decode, dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the weight, as the file has it."""
        return self._rows.nbytes

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self._decode(self._rows[ids.reshape(-1)]).dequantised().to(self._dtype)
        return rows.view(*ids.shape, -1)
