"""GgufCheckpoint: the weights of a GGUF file."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch

from flexinfer.checkpoints.checkpoint import Checkpoint, Decode, StoredWeight, expert_weight
from flexinfer.checkpoints.gguf.architecture import BLOCK
from flexinfer.checkpoints.gguf.architectures import architecture_of
from flexinfer.checkpoints.gguf.blocks import DECODERS, decode
from flexinfer.checkpoints.gguf.config import ROPE_FACTORS, config_of
from flexinfer.checkpoints.gguf.header import GgufTensor, has_header, read_header
from flexinfer.checkpoints.gguf.sources import FLOATS, Ordered, Source, Stored
from flexinfer.errors import UnsupportedModelError
from flexinfer.layers.quantised_rows import QuantisedRows

ENDING = ".gguf"


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
        self._sources: dict[str, Source] = {}
        """Under the model's names."""
        for name, tensor in self._header.tensors.items():
            self._place(name, tensor)
        try:
            for convert in self._architecture.conversions:
                convert(self._sources, self._config)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{path!r} cannot be read: {error}") from error
        self.weights = {
            name: StoredWeight(source.shape, source.is_quantised)
            for name, source in self._sources.items()
        }

    def _place(self, name: str, tensor: GgufTensor) -> None:
        """A tensor of the file under the model's name. Those of layers behind the model's last one
        are left out: they predict tokens beyond the next (the config has checked the count)."""
        layer = BLOCK.fullmatch(name)
        if layer is not None and int(layer[1]) >= self._config.num_hidden_layers:
            return
        known, experts = self._architecture.weight_name(name), self._architecture.experts_name(name)
        if experts is not None and len(tensor.shape) == 3:
            module, parts = experts
            for expert in range(tensor.shape[0]):
                whole = Stored(tensor.part(expert))
                halves = _halves(whole) if len(parts) == 2 else (whole,)
                for part, source in zip(parts, halves, strict=True):
                    self._put(name, expert_weight(module, expert, part), source)
        elif known is not None:
            if tensor.type in DECODERS and len(tensor.shape) < 2:
                raise UnsupportedModelError(
                    f"{self._header.path!r} has {name!r} as {tensor.type} {list(tensor.shape)}; "
                    "known are matrices of such blocks"
                )
            self._put(name, known, Stored(tensor))
        elif name not in (ROPE_FACTORS, *self._architecture.tensors):
            raise UnsupportedModelError(
                f"{self._header.path!r} has the tensor {name!r}, which is not known in models of "
                f"the architecture {self._header.architecture!r}"
            )

    def _put(self, name: str, known: str, source: Source) -> None:
        if known in self._sources:
            raise UnsupportedModelError(
                f"{self._header.path!r} has {name!r} beside another tensor that the model has "
                f"as {known}"
            )
        self._sources[known] = source

    def read(self, name: str) -> torch.Tensor:
        return self._sources[name].floats()

    def read_quantised(self, name: str) -> QuantisedRows:
        return self._sources[name].quantised()

    def read_rows(self, name: str) -> tuple[torch.Tensor, Decode]:
        source = self._sources[name]
        return source.rows(), partial(decode, source.type)

    def adjust(self, model: torch.nn.Module) -> None:
        """Divide the frequencies of the rotary embedding, where the file says by what."""
        tensor = self._header.tensors.get(ROPE_FACTORS)
        if tensor is None or ROPE_FACTORS in self._architecture.tensors:
            return
        factors = Stored(tensor)
        for name, buffer in model.named_buffers():
            if not name.endswith("inv_freq"):
                continue
            if factors.type not in FLOATS or factors.shape != buffer.shape:
                raise UnsupportedModelError(
                    f"{ROPE_FACTORS} is {factors.type} {list(factors.shape)}, where the model has "
                    f"{len(buffer)} frequencies"
                )
            buffer.div_(factors.floats())


def _halves(whole: Source) -> tuple[Source, Source]:
    """Rows of the first part, and of the second one."""
    rows = torch.arange(whole.shape[0])
    middle = len(rows) // 2
    return Ordered(whole, rows[:middle]), Ordered(whole, rows[middle:])


def load_gguf_config(path: str) -> Any:
    """The config that the file describes; reads no weight. Raises UnsupportedModelError."""
    return config_of(read_header(path))
