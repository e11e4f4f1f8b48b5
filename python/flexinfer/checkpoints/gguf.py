"""GgufCheckpoint: the weights of a GGUF file."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import numpy as np
import torch

from flexinfer.checkpoints.checkpoint import Checkpoint, Decode, StoredWeight, expert_weight
from flexinfer.checkpoints.gguf_architectures import architecture_of, bias_half, experts_name
from flexinfer.checkpoints.gguf_blocks import DECODERS, decode
from flexinfer.checkpoints.gguf_config import ROPE_FACTORS, config_of
from flexinfer.checkpoints.gguf_header import GgufTensor, has_header, read_header
from flexinfer.errors import UnsupportedModelError
from flexinfer.layers.quantised import QuantisedTensor

ENDING = ".gguf"
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def is_gguf(model: Any) -> bool:
    """Whether `model` names a GGUF file, which may be missing, or have another ending."""
    if not isinstance(model, (str, os.PathLike)):
        return False
    path = os.fspath(model)
    return path.lower().endswith(ENDING) or (os.path.isfile(path) and has_header(path))


class GgufCheckpoint(Checkpoint):
    method = "gguf"

    def __init__(self, path: str) -> None:
        """Raises UnsupportedModelError for tensors that no weight of the model corresponds to."""
        self._header = read_header(path)
        self._config = config_of(self._header)
        self._architecture = architecture_of(self._header)
        self._tensors: dict[str, GgufTensor] = {}
        """Under the model's names."""
        self._halves: dict[str, dict[int, GgufTensor]] = {}
        """Of biases that are one in the model."""
        for name, tensor in self._header.tensors.items():
            self._place(name, tensor)
        self.weights = {
            name: StoredWeight(tensor.shape, tensor.type in DECODERS)
            for name, tensor in self._tensors.items()
        }
        self.weights |= {name: self._joined(name) for name in self._halves}

    def _place(self, name: str, tensor: GgufTensor) -> None:
        """A tensor of the file under the model's name."""
        known, half = self._architecture.weight_name(name), bias_half(name)
        experts = experts_name(name)
        if experts is not None and len(tensor.shape) == 3:
            module, part = experts
            for expert in range(tensor.shape[0]):
                self._tensors[expert_weight(module, expert, part)] = tensor.part(expert)
        elif half is not None:
            self._halves.setdefault(half[0], {})[half[1]] = tensor
        elif known is not None:
            if tensor.type in DECODERS and len(tensor.shape) != 2:
                raise UnsupportedModelError(
                    f"{self._header.path!r} has {name!r} as {tensor.type} {list(tensor.shape)}; "
                    "known are matrices of such blocks"
                )
            if known in self._tensors:
                raise UnsupportedModelError(
                    f"{self._header.path!r} has {name!r} beside another tensor that the model has "
                    f"as {known}"
                )
            self._tensors[known] = tensor
        elif name not in (ROPE_FACTORS, *self._architecture.tensors):
            raise UnsupportedModelError(
                f"{self._header.path!r} has the tensor {name!r}, which is not known in models of "
                f"the architecture {self._header.architecture!r}"
            )

    def _joined(self, name: str) -> StoredWeight:
        """What two halves are together."""
        halves = self._halves[name].values()
        shapes = {tensor.shape for tensor in halves}
        shape = next(iter(shapes))
        if len(halves) < 2 or len(shapes) > 1 or len(shape) != 2:
            raise UnsupportedModelError(
                f"{self._header.path!r} has {name} in {len(halves)} halves "
                f"{' and '.join(map(str, map(list, shapes)))}; there have to be two of one shape, "
                "a row for each expert"
            )
        if other := {tensor.type for tensor in halves} - FLOATS.keys():
            raise UnsupportedModelError(
                f"{self._header.path!r} has {name} as {other.pop()}; known are {', '.join(FLOATS)}"
            )
        return StoredWeight((shape[0], 2 * shape[1]), False)

    def read(self, name: str) -> torch.Tensor:
        if name in self._halves:
            first, second = (self._floats(self._halves[name][half]).float() for half in (0, 1))
            return torch.stack([first, second], dim=-1).flatten(1)
        weight = self._floats(self._tensors[name])
        if self._architecture.adds_one_to_norms and name.endswith("norm.weight"):
            return weight - 1
        order = self._order(name)
        return weight if order is None else weight[order]

    def read_quantised(self, name: str) -> QuantisedTensor:
        rows, order = self._rows(name), self._order(name)
        return decode(self._tensors[name].type, rows if order is None else rows[order])

    def read_rows(self, name: str) -> tuple[torch.Tensor, Decode]:
        return self._rows(name), partial(decode, self._tensors[name].type)

    def adjust(self, model: torch.nn.Module) -> None:
        """Divide the frequencies of the rotary embedding, where the file says by what."""
        tensor = self._header.tensors.get(ROPE_FACTORS)
        if tensor is None:
            return
        if tensor.type not in FLOATS or tensor.shape != (self._config.head_dim // 2,):
            raise UnsupportedModelError(
                f"{ROPE_FACTORS} is {tensor.type} {list(tensor.shape)}, where the model has "
                f"{self._config.head_dim // 2} frequencies"
            )
        factors = self._bytes(tensor).view(FLOATS[tensor.type])
        for name, buffer in model.named_buffers():
            if name.endswith("inv_freq"):
                buffer.div_(factors)

    def _rows(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        return self._bytes(tensor).view(tensor.shape[0], tensor.row_bytes)

    def _floats(self, tensor: GgufTensor) -> torch.Tensor:
        return self._bytes(tensor).view(FLOATS[tensor.type]).view(tensor.shape)

    def _bytes(self, tensor: GgufTensor) -> torch.Tensor:
        """Read, not mapped: what is mapped stays in the process as long as the file."""
        return torch.from_numpy(
            np.fromfile(tensor.path, np.uint8, tensor.size_bytes, offset=tensor.offset)
        )

    def _order(self, name: str) -> torch.Tensor | None:
        """Which rows of the file are the model's, in its order; None: they are in it already.

        llama.cpp rotates neighbours together (0 with 1, 2 with 3); transformers rotates the first
        half of a head with the second (0 with n / 2, 1 with n / 2 + 1).
        """
        module = name.split(".")[-2]
        if module not in ("q_proj", "k_proj") or not self._architecture.rotates_pairs:
            return None
        rows = self._tensors[name].shape[0]
        heads = rows // self._config.head_dim
        return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).reshape(rows)


def load_gguf_config(path: str) -> Any:
    """The config that the file describes; reads no weight. Raises UnsupportedModelError."""
    return config_of(read_header(path))
