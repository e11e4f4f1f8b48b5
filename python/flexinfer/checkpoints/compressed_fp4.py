"""CompressedFp4: layers of 4 bits by the table of E2M1, as compressed-tensors has them.

"nvfp4-pack-quantized"  weight_packed uint8 [outputs, inputs / 2], two places in a byte, the lower
                        half first; weight_scale float8_e4m3fn [outputs, inputs / 16];
                        weight_global_scale float32, one number, by which scales are divided
"mxfp4-pack-quantized"  the same with weight_scale uint8 [outputs, inputs / 32]: exponents of
                        powers of two (E8M0), and nothing beside them

Inputs stay as they are, or get 8 bits (`a8`): what they would be rounded to on a GPU, 4 bits in
groups, whose tensor is input_global_scale, is not done. Source: compressed_tensors/compressors.
"""

from __future__ import annotations

import torch

from flexinfer.checkpoints.compressed_settings import METHOD, Group, check_floats
from flexinfer.checkpoints.mxfp4 import mxfp4_tensor, nibbles_of
from flexinfer.checkpoints.packed import PackedCheckpoint
from flexinfer.checkpoints.parts import Part, refuse_other
from flexinfer.checkpoints.tensor_files import TensorFiles
from flexinfer.errors import UnsupportedModelError
from flexinfer.layers.codebook import Codebook
from flexinfer.layers.quantised import QuantisedTensor

NVFP4, MXFP4 = "nvfp4-pack-quantized", "mxfp4-pack-quantized"
FORMATS = (NVFP4, MXFP4)
PACKED, SCALES, FACTOR = "weight_packed", "weight_scale", "weight_global_scale"
INPUT_FACTOR = "input_global_scale"
ONE = Part(("F32",), (0, 1))


class CompressedFp4(PackedCheckpoint):
    method = METHOD

    def __init__(self, files: TensorFiles, group: Group) -> None:
        """Raises UnsupportedModelError for what cannot be read; reads no weight."""
        self._has_factor = group.kind == NVFP4
        check_floats(group, 4, ("tensor_group",) if self._has_factor else ("group",))
        self._group_size = 16 if self._has_factor else 32
        refuse_other(group.weights, METHOD, "group_size", (self._group_size,))
        parts = {
            PACKED: Part(("U8",)),
            SCALES: Part(("F8_E4M3",) if self._has_factor else ("U8",)),
        }
        if self._has_factor:
            parts[FACTOR] = ONE
        if group.inputs is not None:
            parts[INPUT_FACTOR] = Part(ONE.dtypes, ONE.dims, is_needed=False)
        super().__init__(files, PACKED, parts)

    def _shape(self, path: str) -> tuple[int, int]:
        outputs, num_bytes = self._files.shape(f"{path}.{PACKED}")
        return outputs, 2 * num_bytes

    def _check_layer(self, path: str) -> None:
        outputs, inputs = self._shape(path)
        found, wanted = self._files.shape(f"{path}.{SCALES}"), (outputs, inputs // self._group_size)
        if inputs % self._group_size or found != wanted:
            raise UnsupportedModelError(
                f"{path}.{SCALES} is {list(found)}, which does not go with a weight "
                f"{[outputs, inputs]} in groups of {self._group_size}"
            )
        if self._has_factor and self._files.shape(f"{path}.{FACTOR}") not in ((), (1,)):
            raise UnsupportedModelError(f"{path}.{FACTOR} has to be one number")

    def _read_layer(self, path: str) -> QuantisedTensor:
        packed, scales = self._part(path, PACKED), self._part(path, SCALES)
        nibbles = nibbles_of(packed)
        if not self._has_factor:
            return mxfp4_tensor(nibbles, scales)
        # The table has twice the numbers of E2M1.
        halves = scales.float() / self._part(path, FACTOR) * 0.5
        integers = nibbles.to(torch.int8) - 8
        return QuantisedTensor(integers, halves, None, 4, 16, codebook=Codebook.E2M1)
