"""Mxfp4Checkpoint: experts in MXFP4, as OpenAI publishes gpt-oss.

gate_up_proj_blocks  uint8 [experts, 2 * hidden, groups, 16]   rows: a gate, its factor, a gate, ...
gate_up_proj_scales  uint8 [experts, 2 * hidden, groups]
down_proj_blocks     uint8 [experts, width, groups, 16]
down_proj_scales     uint8 [experts, width, groups]

A group is 32 inputs. A block is their places in the table of E2M1, two in a byte, the lower half
first; a scale is the exponent of a power of two (E8M0), which is 127 for 1. Source: OCP
Microscaling Formats (MX) Specification 1.0, 5.2 to 5.4, and transformers/integrations/mxfp4.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from flexinfer.checkpoints.checkpoint import EXPERT_PARTS, StoredWeight, expert_weight
from flexinfer.checkpoints.parts import Settings, refuse_other, refuse_unknown
from flexinfer.checkpoints.plain import PlainCheckpoint
from flexinfer.checkpoints.tensor_files import TensorFiles
from flexinfer.errors import UnsupportedModelError
from flexinfer.layers.codebook import Codebook
from flexinfer.layers.quantised import QuantisedTensor

METHOD = "mxfp4"
KNOWN = {"quant_method", "modules_to_not_convert", "dequantize"}
"""Settings. Which modules are not converted is read off their tensors."""
GROUP = 32
BLOCKS, SCALES = "_blocks", "_scales"
GATE_UP, DOWN = "gate_up_proj", "down_proj"
TENSORS = {matrix + ending for matrix in (GATE_UP, DOWN) for ending in (BLOCKS, SCALES)}
ROWS = dict(zip(EXPERT_PARTS, (slice(0, None, 2), slice(1, None, 2), slice(None)), strict=True))
"""Those of an expert's matrix that are this part of it."""
HALF_POWERS = torch.tensor([2.0 ** (exponent - 128) for exponent in range(255)] + [torch.nan])
"""Of each byte half of its power of two, as `Codebook.E2M1` has twice the numbers: exactly, below
the smallest normal number too. 255 is none."""


def nibbles_of(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, 2 * bytes of a row] of [rows, ...]: the lower half of each byte first."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)


def mxfp4_tensor(nibbles: torch.Tensor, exponents: torch.Tensor) -> QuantisedTensor:
    """nibbles: uint8 [columns, depth], places in the table of E2M1; exponents: uint8 [columns,
    depth / 32]. No finite number stands for an exponent of 255."""
    integers = nibbles.to(torch.int8) - 8
    # ggml's quantiser gives groups of zeros the least exponent, whose half is below the smallest
    # normal number: kernels would have to keep all scales of the weight in float32.
    is_zero = torch.unflatten(nibbles & 7, 1, (-1, GROUP)).amax(dim=2) == 0
    scales = HALF_POWERS[exponents.int()].masked_fill(is_zero & (exponents < 2), 1.0)
    return QuantisedTensor(integers, scales, None, 4, GROUP, codebook=Codebook.E2M1)


class _Part(NamedTuple):
    """A weight of an expert."""

    matrix: str
    """Of all experts: without "_blocks" and "_scales"."""
    expert: int
    rows: slice


class Mxfp4Checkpoint(PlainCheckpoint):
    method = METHOD

    def __init__(self, files: TensorFiles, settings: Settings) -> None:
        """Raises UnsupportedModelError for what cannot be read; reads no weight."""
        refuse_unknown(settings, METHOD, KNOWN)
        refuse_other(settings, METHOD, "dequantize", (False, None))
        super().__init__(files)
        self._parts: dict[str, _Part] = {}
        modules = set()
        for name in files:
            path, _, ending = name.rpartition(".")
            if ending in TENSORS:
                modules.add(path)
                del self.weights[name]
        for path in sorted(modules):
            for name, part, shape in self._find_parts(path):
                self._parts[name] = part
                self.weights[name] = StoredWeight(shape, True)

    def read_quantised(self, name: str) -> QuantisedTensor:
        matrix, expert, rows = self._parts[name]
        blocks = self._files.read(matrix + BLOCKS, expert)[rows]
        exponents = self._files.read(matrix + SCALES, expert)[rows]
        return mxfp4_tensor(nibbles_of(blocks), exponents)

    def _find_parts(self, path: str) -> Iterator[tuple[str, _Part, tuple[int, int]]]:
        """Of the experts at `path`: names, where they are, shapes."""
        num_experts, hidden2, width = self._shape(f"{path}.{GATE_UP}")
        num_of_down, *down = self._shape(f"{path}.{DOWN}")
        if hidden2 % 2 or [width, hidden2 // 2] != down or num_experts != num_of_down:
            raise UnsupportedModelError(
                f"{path} has {GATE_UP} of {num_experts} experts [{hidden2}, {width}], which does "
                f"not go with its {DOWN} of {num_of_down} experts {down}"
            )
        shapes = ((hidden2 // 2, width), (hidden2 // 2, width), (width, hidden2 // 2))
        for expert in range(num_experts):
            for kind, shape in zip(EXPERT_PARTS, shapes, strict=True):
                matrix = f"{path}.{DOWN if kind == EXPERT_PARTS[-1] else GATE_UP}"
                yield expert_weight(path, expert, kind), _Part(matrix, expert, ROWS[kind]), shape

    def _shape(self, matrix: str) -> tuple[int, int, int]:
        """Experts, outputs, inputs. Raises UnsupportedModelError for tensors that are missing, or
        of another dtype or shape, whose bytes would be taken for integers."""
        if matrix in self._files:
            raise UnsupportedModelError(
                f"{matrix} is there beside its {BLOCKS} or {SCALES}: which of them is meant is not "
                "known"
            )
        names = matrix + BLOCKS, matrix + SCALES
        missing = [name for name in names if name not in self._files]
        if missing:
            raise UnsupportedModelError(f"experts in {METHOD!r} lack {' and '.join(missing)}")
        blocks, scales = (self._files.shape(name) for name in names)
        for name, shape, num_dims in zip(names, (blocks, scales), (4, 3), strict=True):
            if self._files.dtype(name) != "U8" or len(shape) != num_dims or 0 in shape:
                raise UnsupportedModelError(
                    f"{name} is {self._files.dtype(name)} {list(shape)}, which {METHOD!r} does not "
                    f"write; it has to be U8 of {num_dims} dimensions"
                )
        if blocks != (*scales, GROUP // 2):
            raise UnsupportedModelError(
                f"{names[0]} {list(blocks)} does not go with {names[1]} {list(scales)}: there have "
                f"to be {GROUP // 2} bytes for each scale"
            )
        num_experts, outputs, groups = scales
        return num_experts, outputs, groups * GROUP
