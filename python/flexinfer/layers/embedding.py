"""Embeddings whose code is known, and QuantisedEmbedding: one whose rows stay quantised until they
are looked up."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flexinfer.layers.known import SCALED_EMBEDDINGS
from flexinfer.layers.quantised import QuantisedTensor
from flexinfer.layers.recognise import is_known, is_plain

ROWS_AT_ONCE = 256
"""That are looked up: their numbers are in the cache until they are in the output's dtype."""


def is_embedding(module: torch.nn.Module) -> bool:
    """Whether it looks up rows of its weight, times its scale where it has one, and no more."""
    if not isinstance(module, torch.nn.Embedding) or module.max_norm is not None:
        return False
    if type(module) is torch.nn.Embedding:
        return is_plain(module)
    is_derived = type(module).__bases__ == (torch.nn.Embedding,)
    return is_derived and is_known(module, SCALED_EMBEDDINGS)


def scale_of(embedding: torch.nn.Module) -> torch.Tensor | None:
    """Of one number; None: 1. REQUIRES `is_embedding`."""
    scale: torch.Tensor | None = getattr(embedding, "embed_scale", None)
    return scale


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
        self.embed_scale = None if scale is None else scale.to(dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        dtype = self.weight.dtype
        parts = torch.split(ids.reshape(-1), ROWS_AT_ONCE)
        rows = torch.cat([self._rows_of(part).dequantised().to(dtype) for part in parts])
        rows = rows.view(*ids.shape, rows.shape[1])
        return rows if self.embed_scale is None else rows * self.embed_scale
