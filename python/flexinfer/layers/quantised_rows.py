"""QuantisedRows: a quantised weight of which some outputs are made at a time.

A checkpoint's integers of 4 bits are bytes while they are laid out. Of a head with 200,000 outputs
those would be the most that a process ever holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise

from flexinfer.layers.quantised import QuantisedTensor, QuantisedWeight, TensorKind
from flexinfer.runtime.pieces import of_pieces


class QuantisedRows(QuantisedWeight):
    """Nothing is kept of what was made."""

    def __init__(self, shape: tuple[int, int], make: Callable[[slice], QuantisedTensor]) -> None:
        """make: of some outputs, from any thread; all of one kind."""
        self._shape, self._make = shape, make

    @property
    def shape(self) -> tuple[int, int]:
        return self._shape

    @cached_property
    def kind(self) -> TensorKind:
        return self[:1].kind

    def __getitem__(self, outputs: slice) -> QuantisedTensor:
        first, end, _ = outputs.indices(self._shape[0])
        return self._make(slice(first, end))

    def with_byte_inputs(self, in_groups: bool = False) -> QuantisedRows:
        return QuantisedRows(self._shape, lambda some: self[some].with_byte_inputs(in_groups))

    def whole(self) -> QuantisedTensor:
        columns, depth = self._shape
        return QuantisedTensor.join(of_pieces(self.__getitem__, columns, depth))


def join(weights: Sequence[QuantisedWeight]) -> QuantisedWeight:
    """One after the other, as one layer's outputs. Raises ValueError for unlike ones."""
    if len(weights) == 1:
        return weights[0]
    tensors = [weight for weight in weights if isinstance(weight, QuantisedTensor)]
    if len(tensors) == len(weights):
        return QuantisedTensor.join(tensors)
    kinds = {str(weight.kind) for weight in weights}
    if len(kinds) > 1:
        raise ValueError(f"weights of different kinds cannot be joined: {sorted(kinds)}")
    ends = list(accumulate((weight.shape[0] for weight in weights), initial=0))

    def make(some: slice) -> QuantisedTensor:
        places = zip(weights, pairwise(ends), strict=True)
        return QuantisedTensor.join(
            [
                weight[max(some.start, first) - first : min(some.stop, end) - first]
                for weight, (first, end) in places
                if some.start < end and some.stop > first
            ]
        )

    return QuantisedRows((ends[-1], weights[0].shape[1]), make)
