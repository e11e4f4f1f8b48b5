"""GptqCheckpoint: layers that GPTQ quantised, as AutoGPTQ and GPTQModel write them.

qweight  int32 [inputs / n, outputs]   n = 32 / bits numbers of an output in a word
qzeros   int32 [groups, outputs / n]   less 1 in the format "gptq", as they are in "gptq_v2"
scales         [groups, outputs]
g_idx    int32 [inputs]                the group of each input
"""

from __future__ import annotations

import torch

from flexinfer.checkpoints.packed import PackedCheckpoint, check_group_size, unpack, with_zeros
from flexinfer.checkpoints.parts import INTEGERS, SCALES, WORDS, Part, Settings, refuse_other
from flexinfer.checkpoints.tensor_files import TensorFiles
from flexinfer.errors import UnsupportedModelError
from flexinfer.layers.quantised import QuantisedTensor


class GptqCheckpoint(PackedCheckpoint):
    method = "gptq"

    def __init__(self, files: TensorFiles, settings: Settings) -> None:
        self._bits = refuse_other(settings, self.method, "bits", (4, 8))
        kind = refuse_other(settings, self.method, "checkpoint_format", ("gptq", "gptq_v2"))
        refuse_other(settings, self.method, "is_marlin_format", (False, None))
        refuse_other(settings, self.method, "pack_dtype", ("int32", None))
        refuse_other(settings, self.method, "dynamic", (None, {}))
        self._group_size = settings.get("group_size")
        self._lacking = 1 if kind == "gptq" else 0
        parts = {"qweight": WORDS, "qzeros": WORDS, "scales": SCALES}
        super().__init__(
            files, "qweight", {**parts, "g_idx": Part(INTEGERS, (1,), is_needed=False)}
        )

    def _shape(self, path: str) -> tuple[int, int]:
        words, outputs = self._files.shape(f"{path}.qweight")
        return outputs, words * 32 // self._bits

    def _check_layer(self, path: str) -> None:
        """Inputs whose groups lie apart (desc_act) would have to be gathered for each product."""
        inputs, groups = self._shape(path)[1], self._files.shape(f"{path}.scales")[0]
        check_group_size(path, self._group_size, inputs, groups)
        if f"{path}.g_idx" not in self._files:
            return
        if not torch.equal(self._part(path, "g_idx").long(), _in_order(inputs, groups)):
            raise UnsupportedModelError(
                f"{path}: the inputs of a group lie apart (GPTQ with desc_act, activation order), "
                "which cannot be read here; take a checkpoint without it"
            )

    def _read_layer(self, path: str) -> QuantisedTensor:
        numbers = unpack(self._part(path, "qweight"), self._bits)
        numbers = numbers.permute(1, 0, 2).flatten(1)
        zeros = unpack(self._part(path, "qzeros"), self._bits).flatten(1).int()
        zeros = zeros + self._lacking & (1 << self._bits) - 1
        return with_zeros(numbers, zeros.T, self._part(path, "scales").T, self._bits)


def _in_order(inputs: int, groups: int) -> torch.Tensor:
    return torch.arange(inputs) // (inputs // groups)
