"""Layers of which each rank computes a part, and the collective that makes the whole of the parts.

| layer | each rank has | the whole |
|---|---|---|
| `ReducedLinear` | a part of the inputs, and their weights | sum; residual and bias are rank 0's |
| `ReducedModule` | a part of each expert | sum |
| `VocabEmbedding` | the vectors of some tokens, zeros for others | sum |
| `GatheredLinear` | the logits of some tokens | on rank 0 alone, which samples |

After a sum all ranks hold the same bits, so that each routes tokens to the same experts. All ranks
call in the same order. The parts are made in `models/sharding.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class CollectiveError(RuntimeError):
    """Ranks could not exchange tensors: one of them is gone, or does not answer in time."""


def _exchange(call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    try:
        call(*args, **kwargs)
    except RuntimeError as error:
        raise CollectiveError(str(error).strip().partition("\n")[0]) from error


def all_reduce(part: torch.Tensor) -> torch.Tensor:
    """The sum of all ranks' parts, in place where the part is contiguous."""
    part = part.contiguous()
    _exchange(dist.all_reduce, part)
    return part


class ReducedLinear(torch.nn.Module):
    """The sum over ranks of a linear layer whose inputs are split."""

    def __init__(self, linear: Any, rank: int) -> None:
        """linear: torch.nn.Linear or `Linear` over this rank's inputs, a bias on rank 0 only."""
        super().__init__()
        self.linear = linear
        self.out_features: int = linear.out_features
        self._is_first = rank == 0

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x: [..., this rank's in_features]; residual: [..., out_features], the same on all."""
        if residual is None or not self._is_first:
            return all_reduce(self.linear(x))
        if isinstance(self.linear, torch.nn.Linear):
            return all_reduce(self.linear(x) + residual)
        return all_reduce(self.linear(x, residual))


class ReducedModule(torch.nn.Module):
    """The sum over ranks of what a module gives for its part of the weights."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return all_reduce(self.module(*args, **kwargs))


class VocabEmbedding(torch.nn.Module):
    """An embedding of which each rank has the vectors of consecutive tokens."""

    def __init__(self, embedding: torch.nn.Module, first_token: int, num_tokens: int) -> None:
        """embedding: gives the vectors of tokens first_token, ... for the ids 0, ..."""
        super().__init__()
        self.embedding = embedding
        self._first, self._num = first_token, num_tokens

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: int64 [...] -> [..., width]"""
        ids = token_ids - self._first
        is_elsewhere = (ids < 0) | (ids >= self._num)
        vectors: torch.Tensor = self.embedding(ids.clamp(0, max(0, self._num - 1)))
        return all_reduce(vectors.masked_fill(is_elsewhere[..., None], 0))


class GatheredLinear(torch.nn.Module):
    """A head of which each rank computes consecutive outputs; rank 0 gets all of them, the others
    keep their own."""

    def __init__(self, linear: Any, out_features: int, rank: int, num_ranks: int) -> None:
        """out_features: of all ranks; all but the last have ceil(out_features / num_ranks)."""
        super().__init__()
        self.linear = linear
        self.out_features = out_features
        self._rank, self._num_ranks = rank, num_ranks
        self._width = -(-out_features // num_ranks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in_features] -> [..., out_features] on rank 0"""
        part: torch.Tensor = self.linear(x)
        padded = torch.nn.functional.pad(part, (0, self._width - part.shape[-1])).contiguous()
        if self._rank > 0:
            _exchange(dist.gather, padded, dst=0)
            return part
        parts = [torch.empty_like(padded) for _ in range(self._num_ranks)]
        _exchange(dist.gather, padded, parts, dst=0)
        return torch.cat(parts, dim=-1)[..., : self.out_features]
