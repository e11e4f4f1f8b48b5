"""CompressedCheckpoint: layers of integers in two formats of compressed-tensors (llm-compressor).

"int-quantized"   weight int8 [outputs, inputs]; with inputs of 8 bits too: W8A8
"pack-quantized"  weight_packed int32 [outputs, inputs / n], n = 32 / bits numbers in a word,
                  each plus the middle; weight_shape: outputs and inputs
both              weight_scale [outputs, groups]; weight_zero_point, less the middle: int8, or
                  packed along outputs in int32 [outputs / n, groups]
"""

from __future__ import annotations

import torch

from flexinfer.checkpoints.compressed_settings import METHOD, Group
from flexinfer.checkpoints.packed import (
    PackedCheckpoint,
    check_group_size,
    check_groups,
    unpack,
    with_zeros,
)
from flexinfer.checkpoints.parts import INTEGERS, SCALES, WORDS, Part, refuse_other
from flexinfer.checkpoints.tensor_files import TensorFiles
from flexinfer.errors import UnsupportedModelError
from flexinfer.layers.quantised import QuantisedTensor

PACKED, PLAIN = "pack-quantized", "int-quantized"
FORMATS = (PACKED, PLAIN)
ZEROS = "weight_zero_point"


class CompressedCheckpoint(PackedCheckpoint):
    method = METHOD

    def __init__(self, files: TensorFiles, group: Group) -> None:
        """Raises UnsupportedModelError for what cannot be read; reads no weight."""
        self._has_byte_inputs = group.inputs is not None
        known = (PLAIN,) if self._has_byte_inputs else (PACKED, PLAIN)
        kind = refuse_other({"format": group.kind}, METHOD, "format", known)
        self._is_packed = kind == PACKED
        weights = group.weights
        self._bits: int = refuse_other(
            weights, METHOD, "num_bits", (8, 4) if self._is_packed else (8,)
        )
        _check_settings(group)
        is_symmetric = refuse_other(weights, METHOD, "symmetric", (True, False))
        has_groups = weights.get("strategy") == "group"
        self._group_size = weights.get("group_size") if has_groups else -1
        mark = "weight_packed" if self._is_packed else "weight"
        parts = {
            mark: WORDS if self._is_packed else Part(("I8",)),
            "weight_scale": Part(SCALES.dtypes, (1, 2)),
            "weight_shape": Part(INTEGERS, (1,), is_needed=False),
            ZEROS: Part(INTEGERS, (1, 2), is_needed=not is_symmetric),
        }
        super().__init__(files, mark, parts)

    def _is_layer(self, path: str) -> bool:
        return self._is_packed or self._files.dtype(f"{path}.weight") == "I8"

    def _shape(self, path: str) -> tuple[int, int]:
        outputs, inputs = self._files.shape(f"{path}.{self._mark}")
        return outputs, inputs * (32 // self._bits if self._is_packed else 1)

    def _check_layer(self, path: str) -> None:
        name, zeros = f"{path}.weight_shape", f"{path}.{ZEROS}"
        shape = self._shape(path)
        _, *groups = self._files.shape(f"{path}.weight_scale")
        check_group_size(path, self._group_size, shape[1], groups[0] if groups else 1)
        if name in self._files and tuple(self._files.read(name).tolist()) != shape:
            raise UnsupportedModelError(
                f"{path} has rows that are filled up to {shape[1]} inputs, which cannot be read"
            )
        if self._has_byte_inputs and zeros in self._files and self._files.read(zeros).any():
            raise UnsupportedModelError(
                f"{zeros} has others than 0, which cannot be read where inputs have 8 bits; take a "
                "checkpoint whose weights are symmetric"
            )

    def _read_layer(self, path: str) -> QuantisedTensor:
        numbers, middle = self._part(path, self._mark), 1 << (self._bits - 1)
        scales = self._part(path, "weight_scale").float()
        scales = scales.view(len(scales), -1)
        if self._has_byte_inputs:
            check_groups(numbers, scales, scales[:, :1])
            return QuantisedTensor(numbers, scales, None, 8, 0, byte_inputs=True)
        if self._is_packed:
            numbers = unpack(numbers, self._bits).flatten(1)
        else:
            numbers = numbers.view(torch.uint8) ^ middle
        return with_zeros(numbers, middle + self._zeros(path, scales), scales, self._bits)

    def _zeros(self, path: str, scales: torch.Tensor) -> torch.Tensor:
        name = f"{path}.{ZEROS}"
        if name not in self._files:
            return torch.zeros(scales.shape, dtype=torch.int32)
        zeros = self._files.read(name)
        if zeros.dtype != torch.int32:
            return zeros.view(len(zeros), -1).int()
        middle = 1 << (self._bits - 1)
        zeros = unpack(zeros.t(), self._bits).flatten(1).T[: len(scales)]
        return zeros.int() - middle


def _check_settings(group: Group) -> None:
    """Refuse by name what changes what is computed and is not known."""
    weights, inputs = group.weights, group.inputs
    refuse_other(weights, METHOD, "type", ("int",))
    refuse_other(weights, METHOD, "actorder", (None, "static", "weight"))
    strategies = ("channel", "group") if inputs is None else ("channel",)
    refuse_other(weights, METHOD, "strategy", strategies)
    if inputs is None:
        return
    for part, name, known in (
        (weights, "num_bits", 8),
        (weights, "symmetric", True),
        (inputs, "num_bits", 8),
        (inputs, "type", "int"),
        (inputs, "symmetric", True),
        (inputs, "strategy", "token"),
        (inputs, "dynamic", True),
    ):
        refuse_other(part, METHOD, name, (known,))
