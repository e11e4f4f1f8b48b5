"""PlainCheckpoint: a folder of safetensors whose weights are not quantised, read one by one; and
what folders have of such weights beside others (`parts.py`, `mxfp4.py`).

transformers reads such folders too, and better knows their names; but of experts it holds all of a
model in memory before the first of them can be quantised, whether they lie there one by one or, as
gpt-oss's, in one tensor for a layer.
"""

from __future__ import annotations

import torch

from flexinfer.checkpoints.checkpoint import Checkpoint, StoredWeight
from flexinfer.checkpoints.tensor_files import TensorFiles
from flexinfer.layers.quantised import QuantisedTensor

MODEL_TYPES = (
    *("gemma4", "gemma4_text", "gpt_oss", "mixtral", "nemotron_h", "olmoe"),
    *("qwen2_moe", "qwen3_moe"),
)
"""Those of which the names in folders are known."""


class PlainCheckpoint(Checkpoint):
    method = "safetensors"

    def __init__(self, files: TensorFiles) -> None:
        self._files = files
        self.weights: dict[str, StoredWeight] = {
            name: StoredWeight(files.shape(name), False) for name in files
        }

    def read(self, name: str) -> torch.Tensor:
        return self._files.read(name)

    def read_entry(self, name: str, index: int) -> torch.Tensor:
        return self._files.read(name, index)

    def read_quantised(self, name: str) -> QuantisedTensor:
        raise ValueError(f"{name} is not quantised")
