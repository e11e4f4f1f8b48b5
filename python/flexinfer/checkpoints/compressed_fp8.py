"""CompressedFp8: layers in fp8 by compressed-tensors, formats "float-quantized" and "naive-".

weight        float8_e4m3fn [outputs, inputs]
weight_scale  [outputs, 1], one number, or [rows, columns] of blocks; weights are multiplied by it
input_scale   where inputs are rounded by known scales
"""

from __future__ import annotations

from flexinfer.checkpoints.compressed_settings import METHOD, Group, check_floats
from flexinfer.checkpoints.fp8 import block_of
from flexinfer.checkpoints.scaled import EACH_OUTPUT, WHOLE, ScaledCheckpoint
from flexinfer.checkpoints.tensor_files import TensorFiles

FORMATS = ("float-quantized", "naive-quantized")


class CompressedFp8(ScaledCheckpoint):
    method = METHOD

    def __init__(self, files: TensorFiles, group: Group) -> None:
        """Raises UnsupportedModelError for what cannot be read; reads no weight."""
        check_floats(group, 8, ("channel", "tensor", "block"))
        block = {"channel": EACH_OUTPUT, "tensor": WHOLE}.get(group.weights["strategy"])
        if block is None:
            structure = group.weights.get("block_structure")
            block = block_of(METHOD, "block_structure", structure or [])
        is_static = group.inputs is not None and not group.inputs.get("dynamic")
        super().__init__(files, "weight_scale", block, ("input_scale",) if is_static else ())
