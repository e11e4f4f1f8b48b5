"""Source: where a weight of the model comes from in a GGUF file, and how.

llama.cpp's converter turns some weights about: rows in another order, numbers in another form, one
weight as several. A source undoes it as the weight is read; sources are made of others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod

import numpy as np
import torch

from flexinfer.checkpoints.gguf.blocks import DECODERS, decode
from flexinfer.checkpoints.gguf.header import GgufTensor
from flexinfer.errors import UnsupportedModelError
from flexinfer.layers.quantised import QuantisedTensor
from flexinfer.layers.quantised_rows import QuantisedRows

ALL = slice(None)
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Source(ABC):
    """Nothing is kept of what was read."""

    shape: tuple[int, ...]
    """As the model has it."""
    type: str
    """Of ggml's."""

    @property
    def is_quantised(self) -> bool:
        return self.type in DECODERS

    @abstractmethod
    def rows(self, some: slice = ALL) -> torch.Tensor:
        """uint8 [rows, bytes], as they are stored: some of shape[0]."""

    def floats(self) -> torch.Tensor:
        """The numbers: of one that is quantised float32, else in the file's dtype."""
        rows = self.rows()
        if self.is_quantised:
            matrix = rows.view(prod(self.shape[:-1]), -1)
            return decode(self.type, matrix).dequantised().view(self.shape)
        return rows.view(FLOATS[self.type]).view(self.shape)

    def quantised(self) -> QuantisedRows:
        """A matrix [outputs, inputs] that is."""
        columns, depth = self.shape
        return QuantisedRows((columns, depth), lambda some: decode(self.type, self.rows(some)))


class Stored(Source):
    """As the file has it."""

    def __init__(self, tensor: GgufTensor) -> None:
        self.tensor, self.shape, self.type = tensor, tensor.shape, tensor.type

    def rows(self, some: slice = ALL) -> torch.Tensor:
        """Read, not mapped: what is mapped stays in the process as long as the file."""
        tensor, (first, end, _) = self.tensor, some.indices(self.shape[0])
        row_bytes = tensor.size_bytes // self.shape[0]
        offset = tensor.offset + first * row_bytes
        read = np.fromfile(tensor.path, np.uint8, (end - first) * row_bytes, offset=offset)
        return torch.from_numpy(read).view(end - first, row_bytes)


class Given(Source):
    """Numbers that the file says beside its tensors."""

    def __init__(self, numbers: torch.Tensor) -> None:
        """numbers: float32."""
        self._numbers, self.shape, self.type = numbers, tuple(numbers.shape), "F32"

    def rows(self, some: slice = ALL) -> torch.Tensor:
        count = self.shape[0] if self.shape else 1
        return self._numbers.reshape(count, -1).contiguous().view(torch.uint8)[some]

    def floats(self) -> torch.Tensor:
        return self._numbers


class Ordered(Source):
    """Rows of another in another order."""

    def __init__(self, source: Source, order: torch.Tensor) -> None:
        """order: int64, for each row of the model which of the file's it is."""
        self._source, self._order = source, order
        self.shape, self.type = (len(order), *source.shape[1:]), source.type

    def rows(self, some: slice = ALL) -> torch.Tensor:
        """Those that lie one behind the other are read together, and none between them."""
        wanted, places = self._order[some].sort()
        ends = (wanted.diff() > 1).nonzero().flatten() + 1
        runs = [0, *ends.tolist(), len(wanted)]
        read = [
            self._source.rows(slice(int(wanted[first]), int(wanted[end - 1]) + 1))
            for first, end in pairwise(runs)
        ]
        found = torch.cat(read)
        return torch.empty_like(found).index_copy_(0, places, found)


class Woven(Source):
    """Rows of several others in one order. Where they are quantised in unlike ways, in the least
    that holds the numbers of all."""

    def __init__(self, sources: Sequence[Source], order: torch.Tensor) -> None:
        """order: int64, for each row of the model which of theirs it is, if they stand one behind
        the other."""
        self._sources, self._order = sources, order
        self._types = {source.type for source in sources}
        self.shape = (len(order), *sources[0].shape[1:])
        is_kept = all(source.is_quantised for source in sources) or len(self._types) == 1
        self.type = sources[0].type if is_kept else "F32"

    def rows(self, some: slice = ALL) -> torch.Tensor:
        """Of numbers that are not quantised."""
        return self.floats()[some].view(torch.uint8)

    def floats(self) -> torch.Tensor:
        parts = [source.floats() for source in self._sources]
        if len(self._types) > 1:
            parts = [part.float() for part in parts]
        return torch.cat(parts)[self._order]

    def quantised(self) -> QuantisedRows:
        kinds = [source.quantised().kind for source in self._sources]

        def make(some: slice) -> QuantisedTensor:
            order, first = self._order[some], 0
            parts, places = [], []
            for source in self._sources:
                end = first + source.shape[0]
                own = ((order >= first) & (order < end)).nonzero().flatten()
                if len(own):
                    rows = Ordered(source, order[own] - first).quantised()
                    parts.append(rows.whole().as_one_of(kinds))
                    places.append(own)
                first = end
            return QuantisedTensor.join(parts)[torch.cat(places).argsort()]

        return QuantisedRows((self.shape[0], self.shape[1]), make)


class OrderedInputs(Source):
    """A matrix [outputs, inputs] with the inputs of another in another order."""

    def __init__(self, source: Source, order: torch.Tensor) -> None:
        """order: int64, for each input of the model which of the file's it is. Raises
        UnsupportedModelError where groups of inputs that share a scale are torn apart."""
        self._source, self._order = source, order
        self.shape, self.type = source.shape, source.type
        if self.is_quantised and len(self.shape) == 2:
            try:
                self.quantised()[:1]
            except ValueError as error:
                raise UnsupportedModelError(str(error)) from error

    def rows(self, some: slice = ALL) -> torch.Tensor:
        """Of numbers that are not quantised."""
        rows = self._source.rows(some).view(FLOATS[self.type])
        return rows[:, self._order].view(torch.uint8)

    def floats(self) -> torch.Tensor:
        return self._source.floats()[..., self._order]

    def quantised(self) -> QuantisedRows:
        source, columns = self._source.quantised(), self.shape[0]
        return QuantisedRows(
            (columns, self.shape[1]), lambda some: source[some].with_inputs_in_order(self._order)
        )


class Changed(Source):
    """Numbers made of those of others; not quantised, whether these are or not."""

    def __init__(
        self,
        change: Callable[..., torch.Tensor],
        *sources: Source,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        """change: of the numbers of each, in the file's dtype or float32. shape: of what it gives,
        where that is another than the first one's."""
        self._change, self._sources = change, sources
        self.shape = shape or sources[0].shape
        self.type = "F32" if sources[0].is_quantised else sources[0].type

    def rows(self, some: slice = ALL) -> torch.Tensor:
        return self.floats().view(torch.uint8).view(self.shape[0], -1)[some]

    def floats(self) -> torch.Tensor:
        numbers = self._change(*(source.floats() for source in self._sources))
        return numbers.to(FLOATS[self.type]).contiguous()
