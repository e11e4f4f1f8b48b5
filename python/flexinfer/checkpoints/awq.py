"""AwqCheckpoint: layers that AWQ quantised, as AutoAWQ writes them for its GEMM kernels.

qweight  int32 [inputs, outputs / 8]   the outputs of a word in the order of ORDER
qzeros   int32 [groups, outputs / 8]   likewise
scales         [groups, outputs]
"""

from __future__ import annotations

import torch

from flexinfer.checkpoints.packed import PackedCheckpoint, check_group_size, unpack, with_zeros
from flexinfer.checkpoints.parts import SCALES, WORDS, Settings, refuse_other
from flexinfer.checkpoints.tensor_files import TensorFiles
from flexinfer.layers.quantised import QuantisedTensor

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""In which four bits of a word output k of eight stands."""


class AwqCheckpoint(PackedCheckpoint):
    method = "awq"

    def __init__(self, files: TensorFiles, settings: Settings) -> None:
        refuse_other(settings, self.method, "bits", (4,))
        version = str(settings.get("version", "gemm")).lower()
        refuse_other({"version": version}, self.method, "version", ("gemm",))
        self._group_size = settings.get("group_size")
        parts = {"qweight": WORDS, "qzeros": WORDS, "scales": SCALES}
        super().__init__(files, "qweight", parts)

    def _shape(self, path: str) -> tuple[int, int]:
        inputs, words = self._files.shape(f"{path}.qweight")
        return words * 8, inputs

    def _check_layer(self, path: str) -> None:
        inputs, groups = self._shape(path)[1], self._files.shape(f"{path}.scales")[0]
        check_group_size(path, self._group_size, inputs, groups)

    def _read_layer(self, path: str) -> QuantisedTensor:
        numbers, zeros = (_outputs(self._part(path, part)) for part in ("qweight", "qzeros"))
        return with_zeros(numbers, zeros, self._part(path, "scales").T, 4)


def _outputs(words: torch.Tensor) -> torch.Tensor:
    """[outputs, n] of int32 [n, outputs / 8]."""
    return unpack(words, 4)[..., list(ORDER)].flatten(1).T
