"""LayerAdapters: what LoRA adapters add to the outputs of one layer (Hu et al., 2021).

    rows of the flat batch   | r0 r1 | r2 | r3 r4 r5 | r6 |
    adapters                     1      2      1       none
    outputs                  y[span] += (x[span] A^T) B^T, span by span

Rows without an adapter are not touched: they keep their bits. The spans of a step are in a context
around the forward (`use_adapters`), as what attention computes is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

import torch


class Part(NamedTuple):
    """Where a linear layer's outputs stand among those of the layer that it was joined into."""

    name: str
    """Of that layer, in the same module."""
    first: int
    width: int


class AdapterSpan(NamedTuple):
    """Rows [start, end) of the flat batch, which an adapter is for."""

    number: int
    start: int
    end: int


class StepAdapters(NamedTuple):
    """The adapters of one step."""

    num_rows: int
    """Of the flat batch, with padding."""
    spans: tuple[AdapterSpan, ...]


class ColumnUpdate(NamedTuple):
    """outputs[:, first : first + width] += hidden[:, start : start + rank] b"""

    first: int
    start: int
    b: torch.Tensor
    """[rank, width], scaled"""


@dataclass(frozen=True, slots=True)
class LayerUpdate:
    """One adapter's part in one layer. Layers that are joined into one (queries, keys and values)
    have a column update each, and one product with their inputs."""

    a: torch.Tensor
    """[sum of the ranks, in_features]"""
    columns: tuple[ColumnUpdate, ...]

    @classmethod
    def of(cls, parts: Sequence[tuple[int, torch.Tensor, torch.Tensor]]) -> LayerUpdate:
        """parts: (first column, A [rank, in_features], B [width, rank], scaled) of each product."""
        columns, start = [], 0
        for first, _, b in parts:
            columns.append(ColumnUpdate(first, start, b.t().contiguous()))
            start += b.shape[1]
        return cls(torch.cat([a for _, a, _ in parts]), tuple(columns))

    def to(self, device: torch.device) -> LayerUpdate:
        """The same there; itself, if it is there."""
        columns = (column._replace(b=column.b.to(device)) for column in self.columns)
        return LayerUpdate(self.a.to(device), tuple(columns))

    def add_to(self, output: torch.Tensor, x: torch.Tensor) -> None:
        """output: [rows, out_features], changed; x: [rows, in_features]."""
        hidden = torch.nn.functional.linear(x, self.a)
        for first, start, b in self.columns:
            rank, width = b.shape
            output[:, first : first + width].addmm_(hidden[:, start : start + rank], b)


@dataclass(frozen=True, slots=True)
class LayerAdapters:
    """Of one layer, by the number of the adapter."""

    updates: dict[int, LayerUpdate] = field(default_factory=dict)

    def add_to(self, output: torch.Tensor, x: torch.Tensor) -> None:
        """Add what the adapters of the step in force add. output: [..., out_features], contiguous;
        x: [..., in_features], all rows of the step. Raises RuntimeError for other rows."""
        step = _step.get()
        if step is None:
            return
        rows, outputs = x.reshape(-1, x.shape[-1]), output.view(-1, output.shape[-1])
        if len(rows) != step.num_rows:
            raise RuntimeError(
                f"a layer with adapters got {len(rows)} rows of a step of {step.num_rows}"
            )
        for number, start, end in step.spans:
            update = self.updates.get(number)
            if update is not None:
                update.add_to(outputs[start:end], rows[start:end])


_step: ContextVar[StepAdapters | None] = ContextVar("flexinfer_adapters", default=None)


def are_in_force() -> bool:
    """Whether the step that is computed has rows with an adapter."""
    return _step.get() is not None


@contextmanager
def use_adapters(step: StepAdapters) -> Iterator[None]:
    """Within this context layers compute the step with its adapters."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)
