"""Form: how llama.cpp's converter writes the models of one type of transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gguf
import torch


@dataclass(frozen=True, slots=True)
class Moved:
    """Rows or columns of a weight, as the file has them: in another order."""

    tensor: torch.Tensor
    order: torch.Tensor
    """int64: of each of the file's, which of the weight's it is."""
    dim: int = 0

    def read(self) -> torch.Tensor:
        return self.tensor.index_select(self.dim, self.order)

    def write(self, numbers: torch.Tensor) -> None:
        """Set the weight to these of the file."""
        self.tensor.index_copy_(self.dim, self.order, numbers)


Parts = dict[str, torch.Tensor | Moved]


def replace_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Write another value of the architecture than others have, a list for each layer; None: let
    it have none."""
    whole = f"{writer.arch}.{key}"
    writer.kv_data[0].pop(whole, None)
    is_small = isinstance(value, int) and 0 <= value < 1 << 32
    adders = {
        bool: writer.add_bool,
        int: writer.add_uint32 if is_small else writer.add_int64,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    if value is not None:
        adders[type(value)](whole, value)


def add_window(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window or 0)


def add_pattern(writer: gguf.GGUFWriter, config: Any) -> None:
    """Which layers have the window."""
    add_window(writer, config)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])


def add_bases(writer: gguf.GGUFWriter, config: Any) -> None:
    """Windows of some layers, which have a base of their own."""
    add_pattern(writer, config)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])


@dataclass(frozen=True, slots=True)
class Form:
    """Tensors of a file are views of the model's weights, which are set to what is written of them;
    or made of these, where they are exact: float32."""

    architecture: str
    """llama.cpp's name."""
    add_keys: Callable[[gguf.GGUFWriter, Any], None] = lambda writer, config: None
    """Writes what only such configs have, or others have otherwise."""
    parts: Callable[[str, torch.Tensor, Any], Parts | None] = lambda name, tensor, config: None
    """A weight of the model -> the file's tensors; None: the one that gguf has a name for."""

    stacked: Callable[[dict[str, torch.Tensor]], Parts] = lambda tensors: {}
    """All weights of the model -> what the file has several of them in, as they are."""

    def parts_of(self, name: str, tensor: torch.Tensor, config: Any) -> Parts:
        parts = self.parts(name, tensor, config)
        return {self.name_of(name, config): tensor} if parts is None else parts

    def name_of(self, name: str, config: Any) -> str:
        """The file's, by gguf's own table."""
        arch = next(a for a, own in gguf.MODEL_ARCH_NAMES.items() if own == self.architecture)
        names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own is not None, name
        is_whole = own.endswith((".weight", ".bias", ".ssm_a"))
        return own if is_whole else f"{own}.weight"  # sinks
