"""Which format of compressed-tensors a folder has, and what reads it."""

from __future__ import annotations

from collections.abc import Callable

from flexinfer.checkpoints import compressed, compressed_fp4, compressed_fp8
from flexinfer.checkpoints.checkpoint import Checkpoint
from flexinfer.checkpoints.compressed_settings import METHOD, Group, only_group
from flexinfer.checkpoints.parts import Settings, refuse_other
from flexinfer.checkpoints.tensor_files import TensorFiles

READERS: dict[str, Callable[[TensorFiles, Group], Checkpoint]] = {
    **dict.fromkeys(compressed.FORMATS, compressed.CompressedCheckpoint),
    **dict.fromkeys(compressed_fp8.FORMATS, compressed_fp8.CompressedFp8),
    **dict.fromkeys(compressed_fp4.FORMATS, compressed_fp4.CompressedFp4),
}


def open_compressed(files: TensorFiles, settings: Settings) -> Checkpoint:
    """Raises UnsupportedModelError for what cannot be read; reads no weight."""
    group = only_group(settings)
    kind = refuse_other({"format": group.kind}, METHOD, "format", tuple(READERS))
    return READERS[kind](files, group)
