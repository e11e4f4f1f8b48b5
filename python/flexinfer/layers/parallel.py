"""Layers of which each rank computes a part, and the exchange that makes the whole of the parts.

| layer | each rank has | the whole |
|---|---|---|
| `ReducedLinear` | a part of the inputs, and their weights | sum; residual and bias are rank 0's |
| `ReducedModule` | a part of each expert | sum |
| `VocabEmbedding` | the vectors of some tokens, zeros for others | sum |
| `GatheredLinear` | the logits of some tokens | on rank 0 alone, which samples |

After a sum all ranks hold the same bits, so that each routes tokens to the same experts. The parts
are made in `models/sharding.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from flexinfer.layers.exchanges import Exchanges


class ReducedLinear(torch.nn.Module):
    """The sum over ranks of a linear layer whose inputs are split."""

    block_rows: int | None = None
    """As of `Linear`: it asks for none."""

    def __init__(self, linear: Any, exchanges: Exchanges) -> None:
        """linear: torch.nn.Linear or `Linear` over this rank's inputs, a bias on rank 0 only."""
        super().__init__()
        self.linear = linear
        self.out_features: int = linear.out_features
        self.exchanges = exchanges

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x: [..., this rank's in_features]; residual: [..., out_features], the same on all."""
        if residual is None or self.exchanges.rank > 0:
            return self.exchanges.sum(self.linear(x))
        if isinstance(self.linear, torch.nn.Linear):
            return self.exchanges.sum(self.linear(x) + residual)
        return self.exchanges.sum(self.linear(x, residual))


class ReducedModule(torch.nn.Module):
    """The sum over ranks of what a module gives for its part of the weights."""

    def __init__(self, module: torch.nn.Module, exchanges: Exchanges) -> None:
        super().__init__()
        self.module = module
        self.exchanges = exchanges

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.exchanges.sum(self.module(*args, **kwargs))


class VocabEmbedding(torch.nn.Module):
    """An embedding of which each rank has the vectors of consecutive tokens."""

    def __init__(
        self, embedding: torch.nn.Module, first_token: int, num_tokens: int, exchanges: Exchanges
    ) -> None:
        """embedding: gives the vectors of tokens first_token, ... for the ids 0, ..."""
        super().__init__()
        self.embedding = embedding
        self.exchanges = exchanges
        self._first, self._num = first_token, num_tokens

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: int64 [...] -> [..., width]"""
        ids = token_ids - self._first
        is_elsewhere = (ids < 0) | (ids >= self._num)
        vectors: torch.Tensor = self.embedding(ids.clamp(0, max(0, self._num - 1)))
        return self.exchanges.sum(vectors.masked_fill(is_elsewhere[..., None], 0))


class GatheredLinear(torch.nn.Module):
    """A head of which each rank computes consecutive outputs; rank 0 gets all of them, the others
    keep their own."""

    def __init__(self, linear: Any, out_features: int, exchanges: Exchanges) -> None:
        """out_features: of all ranks; all but the last have ceil(out_features / num_ranks)."""
        super().__init__()
        self.linear = linear
        self.out_features = out_features
        self.exchanges = exchanges

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in_features] -> [..., out_features] on rank 0"""
        return self.exchanges.gather(self.linear(x), self.out_features)
