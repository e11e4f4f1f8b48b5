"""KnownPositions: what stands in for a cache where a model asks its cache for positions."""

from __future__ import annotations

from typing import Any

import torch


class KnownPositions:
    """Llama 4 scales queries by position: the row in the batch plus the tokens in the cache. In a
    flat batch that is another number for each row."""

    def __init__(self, positions: torch.Tensor) -> None:
        """positions: [num_tokens] int64, of each row in its request."""
        self._seen = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        """[num_tokens]: what makes the row's number its position."""
        return self._seen

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, **others: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both as they are: attention stores them."""
        return key, value
