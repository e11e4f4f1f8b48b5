"""Tensor-parallel engines over the tiny models, in folders as a user would have them."""

from __future__ import annotations

import gc
from collections import Counter
from functools import cache
from tempfile import mkdtemp
from typing import Any

import psutil
import torch

from flexinfer import LLMEngine
from flexinfer.config import EngineConfig
from helpers.open_files import open_files
from helpers.tiny_models import make_model


@cache
def folder_of(name: str) -> str:
    """The tiny model of this name as a folder of safetensors."""
    import atexit
    from shutil import rmtree

    folder = mkdtemp(prefix="flexinfer-test-")
    atexit.register(rmtree, folder, ignore_errors=True)
    make_model(name).save_pretrained(folder)
    return folder


def make_ranked_engine(name: str = "llama", num_ranks: int = 2, **settings: Any) -> LLMEngine:
    """Of small chunks; the ranks' books are compared in every step. Close it."""
    defaults: dict[str, Any] = {
        "max_num_seqs": 6,
        "kv_cache_memory_bytes": 2 << 20,
        "chunk_bytes": 4096,
        "device": "cpu",
        "threads": 1,
        "skip_tokenizer_init": True,
        "distributed_check_interval": 1,
        "distributed_timeout_s": 20.0,
    }
    config = {**defaults, "model": folder_of(name), "tensor_parallel_size": num_ranks, **settings}
    threads = torch.get_num_threads()
    try:
        return LLMEngine.from_engine_args(EngineConfig(**config))
    finally:
        torch.set_num_threads(threads)


def children() -> set[int]:
    """Processes started by this one that have not ended: by their parents' ids, which no thread of
    this process can change by ending meanwhile."""
    return {child.pid for child in psutil.Process().children()}


def open_things() -> Counter[tuple[str, int]]:
    """Sockets and memory files that this process has open, those of garbage left out."""
    gc.collect()
    found = open_files()
    return Counter({one: found[one] for one in found if one[0].startswith(("socket:", "/memfd:"))})
