"""Exchanges: what the ranks of a forward tell each other, also where the part of one fails.

    rank 0   sum  sum  ...  sum  gather: logits, and who has failed
    rank 1   sum  sum  ...  sum  gather
    rank 2   sum  FAILS: zeros ... gather: "I have failed"

A forward is the same exchanges in the same order on all ranks, of as many rows as the step has. So
a rank whose part fails sends zeros in those that are left: nobody waits for it, the step is lost on
all ranks alike, and the next one finds all of them together. Not thread-safe.

In a compiled model they are operators that all write to one tensor, `order`: a compiler may neither
leave one out nor change their order, which must be the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from flexinfer.runtime.torch_operators import define_operators

_exchanges: WeakValueDictionary[int, Exchanges] = WeakValueDictionary()
_next_number = count()


class CollectiveError(RuntimeError):
    """Ranks could not exchange tensors: one of them is gone, or does not answer in time."""


class StepFailedError(RuntimeError):
    """On rank 0: `rank` could not compute its part of a forward; all ranks are through with it."""

    def __init__(self, rank: int, message: str = "failed in its part of a step") -> None:
        super().__init__(f"rank {rank} {message}")
        self.rank = rank


class Exchanges:
    """Of one rank of `num_ranks`, over torch.distributed's default group. The first forward shows
    which they are; the gather is the last of each."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._sums: list[torch.Tensor] = []  # of a forward: a row of each
        self._logits: torch.Tensor | None = None  # a row of a rank's; known after one forward
        self._num_summed = 0
        self._is_over = False
        register()
        self._number = next(_next_number)
        self._order = torch.zeros(1)
        _exchanges[self._number] = self

    def begin(self) -> None:
        """A forward begins."""
        self._num_summed, self._is_over = 0, False

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' parts [..., rows, width], in place where the part is contiguous."""
        part = part.contiguous()
        if torch.compiler.is_compiling():
            torch.ops.flexinfer.rank_sum_(part, self._order, self._number)
            return part
        if self._logits is None:
            self._sums.append(part.new_zeros(part.shape[-1]))
        self._num_summed += 1
        _exchange(dist.all_reduce, part)
        return part

    def gather(self, part: torch.Tensor, width: int) -> torch.Tensor:
        """part: [..., ceil(width / num_ranks) or, on the last ranks, fewer] -> [..., width] on rank
        0, the part itself elsewhere. Raises StepFailedError on rank 0 where another rank failed."""
        if torch.compiler.is_compiling():
            whole: torch.Tensor = torch.ops.flexinfer.rank_gather(
                part, self._order, self._number, width
            )
            return whole
        if self._logits is None:
            self._logits = part.new_zeros(-(-width // self.num_ranks))
        part_width = len(self._logits)
        leading = part.shape[:-1]
        sent = part.new_zeros(leading.numel() * part_width + 1)
        sent[:-1].view(*leading, part_width)[..., : part.shape[-1]] = part
        parts = self._gather(sent)
        if not parts:
            return part
        for rank, other in enumerate(parts):
            if other[-1] != 0:
                raise StepFailedError(rank)
        whole = torch.cat([p[:-1].view(*leading, part_width) for p in parts], dim=-1)
        return whole[..., :width].contiguous()

    def abandon(self, num_rows: int, num_logits: int) -> None:
        """Take part in what is left of a forward of so many rows, as the rank that has failed."""
        if self._is_over:
            return
        assert self._logits is not None
        for row in self._sums[self._num_summed :]:
            _exchange(dist.all_reduce, row.new_zeros(num_rows, len(row)))
        sent = self._logits.new_zeros(num_logits * len(self._logits) + 1)
        sent[-1] = 1
        self._gather(sent)

    def _gather(self, sent: torch.Tensor) -> list[torch.Tensor]:
        """What each rank sent, on rank 0; nothing elsewhere."""
        parts = [torch.empty_like(sent) for _ in range(self.num_ranks if self.rank == 0 else 0)]
        _exchange(dist.gather, sent, parts or None, dst=0)
        self._is_over = True
        return parts


def exchanges_of(model: torch.nn.Module) -> Exchanges:
    """Those of a model whose layers are split among ranks."""
    for module in model.modules():
        found = getattr(module, "exchanges", None)
        if isinstance(found, Exchanges):
            return found
    raise ValueError(f"{type(model).__name__} is not split among ranks")


@cache
def register() -> torch.library.Library:
    """Make the operators known to torch; once a process."""
    return define_operators(
        (
            "rank_sum_(Tensor(a!) part, Tensor(b!) order, int exchanges) -> ()",
            _rank_sum,
            _rank_sum_shape,
        ),
        (
            "rank_gather(Tensor part, Tensor(a!) order, int exchanges, int width) -> Tensor",
            _rank_gather,
            _rank_gather_shape,
        ),
    )


def _rank_sum(part: torch.Tensor, order: torch.Tensor, exchanges: int) -> None:
    whole = _exchanges[exchanges].sum(part)
    if whole is not part:  # it was not contiguous
        part.copy_(whole)


def _rank_sum_shape(part: torch.Tensor, order: torch.Tensor, exchanges: int) -> None:
    pass


def _rank_gather(
    part: torch.Tensor, order: torch.Tensor, exchanges: int, width: int
) -> torch.Tensor:
    whole = _exchanges[exchanges].gather(part, width)
    return whole.clone() if whole is part else whole  # operators give what is new


def _rank_gather_shape(
    part: torch.Tensor, order: torch.Tensor, exchanges: int, width: int
) -> torch.Tensor:
    is_whole = _exchanges[exchanges].rank == 0
    return part.new_empty(*part.shape[:-1], width if is_whole else part.shape[-1])


def _exchange(call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    try:
        call(*args, **kwargs)
    except RuntimeError as error:
        raise CollectiveError(str(error).strip().partition("\n")[0]) from error
