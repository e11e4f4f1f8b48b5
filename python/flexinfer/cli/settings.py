"""EngineSettings: how a command opens the engine, and where the shipped model lies."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from flexinfer.cli.errors import check_folder
from flexinfer.cli.option_model import option
from flexinfer.cli.options import (
    ATTENTION_BACKEND_HELP,
    COMPILE_HELP,
    KV_CACHE_DTYPE_HELP,
    QUANTIZATION_HELP,
    THREADS_HELP,
)

if TYPE_CHECKING:
    from flexinfer.llm import LLM

SHIPPED_MODEL = Path(__file__).resolve().parents[1] / "data" / "tiny_chat"
SHIPPED_CHUNK_BYTES = "32KiB"
"""Some thirteen tokens of the shipped model: small enough to see what is shared."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Options that commands with an engine share; None leaves the choice to the engine."""

    model: Annotated[
        str | None,
        option("Folder, GGUF file or hub id of a causal model; by default the small one shipped."),
    ] = None
    dtype: Annotated[str, option("float32, bfloat16, float16, or auto (the model's own).")] = "auto"
    quantization: Annotated[str, option(QUANTIZATION_HELP)] = "auto"
    kv_cache_dtype: Annotated[str, option(KV_CACHE_DTYPE_HELP)] = "auto"
    device: Annotated[
        str | None, option("cpu, cuda or cuda:N; by default a GPU if there is one.")
    ] = None
    chunk_bytes: Annotated[
        str | None, option("Bytes per physical chunk, such as 64KiB or 2MiB.")
    ] = None
    layers_per_plane: Annotated[
        int | None, option("1: ranges of its own for each layer; by default all side by side.")
    ] = None
    memory: Annotated[
        str | None, option("Budget of KV memory, such as 256MiB; by default half of what is free.")
    ] = None
    seed: Annotated[int, option("Seed of sampling; in the demo, also of the conversations.")] = 0
    trace: Annotated[
        Path | None,
        option("Record every memory operation, for `flexinfer replay`. Contains the tokens."),
    ] = None
    attention_backend: Annotated[str, option(ATTENTION_BACKEND_HELP)] = "auto"
    enforce_eager: Annotated[
        bool, option("On a GPU: no CUDA graphs for decoding.", "--enforce-eager")
    ] = False
    gpu_memory_utilization: Annotated[
        float, option("Fraction of a GPU for weights, activations and KV.")
    ] = 0.9
    threads: Annotated[int | None, option(THREADS_HELP)] = None
    compile: Annotated[bool, option(COMPILE_HELP, "--compile")] = False

    @property
    def max_num_seqs(self) -> int:
        """As many as the command runs at once."""
        return 4

    @property
    def is_shipped(self) -> bool:
        return self.model is None

    @property
    def engine_device(self) -> str | None:
        """The shipped model is too small for a GPU, unless one is asked for."""
        return self.device or ("cpu" if self.is_shipped else None)

    @property
    def engine_chunk_bytes(self) -> str | None:
        """Small for the shipped model, but not on a GPU, whose chunks are 2 MiB at least."""
        is_small = self.is_shipped and (self.device is None or self.device.startswith("cpu"))
        return self.chunk_bytes or (SHIPPED_CHUNK_BYTES if is_small else None)

    @property
    def folder(self) -> str:
        """Folder or hub id of the model. Raises ValueError if the shipped one is not there."""
        if self.model is not None:
            return self.model
        if not (SHIPPED_MODEL / "config.json").is_file():
            raise ValueError(f"the shipped model is not in {SHIPPED_MODEL}; name one by --model")
        return str(SHIPPED_MODEL)

    def check_model(self) -> str:
        """The folder, if a config can be read from it; ValueError otherwise. Reads no weights."""
        folder = self.folder
        self._prepare()
        from flexinfer.models.model_config import load_config

        load_config(folder)
        return folder

    def open(self, *, enable_prefix_caching: bool = True, like: LLM | None = None) -> LLM:
        """An engine; `like`: with the weights of that one. Raises ValueError or OSError."""
        folder = self.folder
        self._prepare()
        from flexinfer.llm import LLM

        source: dict[str, Any] = {"model": folder}
        if like is not None:
            source = {"model": like.engine.loaded.model, "tokenizer": like.get_tokenizer()}
        return LLM(
            **source,
            dtype=self.dtype,
            quantization=self.quantization if like is None else None,
            kv_cache_dtype=self.kv_cache_dtype,
            device=self.engine_device,
            seed=self.seed,
            max_num_seqs=self.max_num_seqs,
            enable_prefix_caching=enable_prefix_caching,
            kv_cache_memory_bytes=self.memory,
            chunk_bytes=self.engine_chunk_bytes,
            layers_per_plane=self.layers_per_plane,
            attention_backend=self.attention_backend,
            enforce_eager=self.enforce_eager,
            gpu_memory_utilization=self.gpu_memory_utilization,
            threads=self.threads,
            compile=self.compile,
            trace=None if like is not None or self.trace is None else str(self.trace),
        )

    def _prepare(self) -> None:
        """torch first: loaded by transformers it would know nothing of `threads`. Raises ValueError
        for a number of threads that this machine does not have, and a trace without a folder."""
        from flexinfer.runtime.torch_settings import set_up_torch

        set_up_torch(self.threads)
        _quiet()
        if self.trace is not None:
            check_folder(self.trace, "--trace")


def _quiet() -> None:
    """No progress bars and no advice from transformers between the lines of a command."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
