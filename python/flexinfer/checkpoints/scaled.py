"""ScaledCheckpoint: folders whose linear layers have numbers of 8 bits (fp8, e4m3) and scales.

There are no products with such weights here: they are read as what they stand for, number * scale
of its block, computed in float32. What inputs would be rounded to on a GPU is not done.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

from flexinfer.checkpoints.parts import SCALES, Part, PartsCheckpoint
from flexinfer.checkpoints.tensor_files import TensorFiles
from flexinfer.errors import UnsupportedModelError
from flexinfer.layers.quantised import QuantisedTensor
from flexinfer.runtime.pieces import of_pieces

WEIGHT = "weight"
NUMBERS = Part(("F8_E4M3",))
Block = tuple[int, int]
"""Outputs and inputs that share a scale; 0: all."""
EACH_OUTPUT: Block = (1, 0)
WHOLE: Block = (0, 0)


class ScaledCheckpoint(PartsCheckpoint):
    stays_quantised = False

    def __init__(
        self, files: TensorFiles, scale: str, block: Block, ignored: tuple[str, ...] = ()
    ) -> None:
        """scale: what the tensor of a layer's scales is called; ignored: tensors of it that change
        nothing here.

        Raises UnsupportedModelError for layers that cannot be read; reads no weight."""
        self._scale, self._block = scale, block
        parts: dict[str, Part] = {
            WEIGHT: NUMBERS,
            scale: Part(SCALES.dtypes, (0, 1, 2)),
            **{name: Part(SCALES.dtypes, (0, 1, 2), is_needed=False) for name in ignored},
        }
        super().__init__(files, WEIGHT, parts)
        self._refuse_without_scales(parts)

    @property
    def growing_bytes(self) -> int:
        return sum(prod(self._shape(path)) for path in self._layers)

    def read(self, name: str) -> torch.Tensor:
        """Of a layer's weight what it stands for: float32."""
        path, _, ending = name.rpartition(".")
        if path not in self._layers or ending != WEIGHT:
            return super().read(name)
        weight, scales = self._part(path, WEIGHT), self._part(path, self._scale)
        block = _whole(self._block, weight.shape)
        try:
            return scaled(weight, scales.view(_grid(block, weight.shape)), block)
        except ValueError as error:
            raise UnsupportedModelError(f"{name} cannot be read: {error}") from error

    def read_quantised(self, name: str) -> QuantisedTensor:
        raise ValueError(f"{name} is read as numbers")

    def _is_layer(self, path: str) -> bool:
        return self._files.dtype(f"{path}.{WEIGHT}") in NUMBERS.dtypes

    def _shape(self, path: str) -> tuple[int, int]:
        outputs, inputs = self._files.shape(f"{path}.{WEIGHT}")
        return outputs, inputs

    def _check_layer(self, path: str) -> None:
        shape, name = self._shape(path), f"{path}.{self._scale}"
        found = self._files.shape(name)
        block = _whole(self._block, shape)
        grid = _grid(block, shape)
        known: list[tuple[int, ...]] = [grid]
        if self._block == EACH_OUTPUT:
            known.append(grid[:1])
        elif self._block == WHOLE:
            known += [(1,), ()]
        if found not in known:
            raise UnsupportedModelError(
                f"{name} is {list(found)}, which does not go with a weight {list(shape)} in blocks "
                f"of {list(block)}; it has to be {list(grid)}"
            )

    def _refuse_without_scales(self, parts: Mapping[str, Part]) -> None:
        for name in self._files:
            path, _, ending = name.rpartition(".")
            if self._files.dtype(name).startswith("F8") and (
                path not in self._layers or ending not in parts
            ):
                raise UnsupportedModelError(
                    f"{name} is {self._files.dtype(name)}, which {self.method!r} has here for the "
                    "weights of linear layers alone, and as F8_E4M3"
                )


def scaled(weight: torch.Tensor, scales: torch.Tensor, block: Block) -> torch.Tensor:
    """float32 [outputs, inputs] of weight [outputs, inputs], float8_e4m3fn, times the scales
    [rows, columns], float, of its blocks. The last block of either side may be cut off. Raises
    ValueError for what is no finite number."""
    outputs, inputs = weight.shape
    by_input = scales.float().repeat_interleave(block[1], dim=1)[:, :inputs]
    numbers = torch.empty(outputs, inputs, dtype=torch.float32)

    def write(some: slice) -> bool:
        rows = torch.arange(some.start, some.stop) // block[0]
        torch.mul(weight[some].float(), by_input[rows], out=numbers[some])
        return all(end.isfinite() for end in torch.aminmax(numbers[some]))

    if not all(of_pieces(write, outputs, 4 * inputs)):
        raise ValueError("it has numbers or scales that are no finite numbers: it is damaged")
    return numbers


def _whole(block: Block, shape: tuple[int, ...]) -> Block:
    return block[0] or shape[0], block[1] or shape[1]


def _grid(block: Block, shape: tuple[int, ...]) -> tuple[int, int]:
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])
