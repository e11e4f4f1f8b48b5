"""RotaryTable: cosines and sines of positions looked up, where each step computed them anew.

Ten operators on few numbers took 0.2 ms of a decode step, whose weights and KV have pushed torch's
code out of the caches.
"""

from __future__ import annotations

from typing import Any

import torch

from flexinfer.layers.known import ROTARY_EMBEDDINGS
from flexinfer.layers.recognise import is_known

MAX_POSITIONS = 4096
"""Up to 4 MiB. Steps with tokens beyond them, of which there are few, compute all."""
CONSTANT_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Of rotary embeddings: their frequencies do not hang on the positions of a step."""


class RotaryTable:
    """REQUIRES a module that `keep_rotary_table` has accepted. Gives the same bits."""

    def __init__(self, module: Any, max_positions: int) -> None:
        self._module = module
        self._size = min(max_positions, MAX_POSITIONS)
        self._rows: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(
        self, x: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """position_ids: int64 [1, tokens]. cos and sin [1, tokens, head_dim], of x's dtype."""
        positions = position_ids[0]
        if not len(positions) or int(positions.max()) >= self._size:
            return self._module(x, position_ids)  # type: ignore[no-any-return]
        if self._rows is None or self._rows[0].dtype != x.dtype:
            cos, sin = self._module(x, torch.arange(self._size, device=x.device)[None])
            self._rows = cos[0], sin[0]
        cos, sin = self._rows
        return cos.index_select(0, positions)[None], sin.index_select(0, positions)[None]


def keep_rotary_table(module: Any, max_positions: int) -> Any:
    """A table in the place of a rotary embedding whose code is known; of others the module."""
    is_constant = getattr(module, "rope_type", None) in CONSTANT_TYPES
    if not is_constant or not is_known(module, ROTARY_EMBEDDINGS):
        return module
    return RotaryTable(module, max_positions)
