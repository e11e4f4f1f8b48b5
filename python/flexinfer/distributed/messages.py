"""What ranks tell each other beside tensors: plain values that are pickled. No torch."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexinfer.config import EngineConfig
    from flexinfer.distributed.operations import Operation
    from flexinfer.runner.plan import StepPlan

PACKAGES = ("flexinfer", "torch", "transformers")
SAMPLE_BYTES = 64 << 10
"""Of the head and of the end of each weight file."""


@dataclass(frozen=True, slots=True)
class Hello:
    """From a rank, when it has connected."""

    rank: int
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class Setup:
    """To a rank: what to load, and where the others meet."""

    config: EngineConfig
    fingerprint: str
    num_ranks: int
    store: tuple[str, int]
    threads: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Probe:
    """To a rank, when all have their weights: take part in the model's first forward."""


@dataclass(frozen=True, slots=True)
class OpenManager:
    """To a rank that has its weights: how much KV memory it gets."""

    budget_bytes: int
    max_seq_len: int
    pads_rows: bool
    """Whether batches are padded, which hangs on the CPU of a rank: rank 0's choice."""


@dataclass(frozen=True, slots=True)
class Step:
    """To all ranks, one a step: what rank 0's manager has done since, and what to compute now."""

    number: int
    operations: list[Operation]
    plan: StepPlan | None = None
    books: str | None = None
    """To be compared."""
    is_answered: bool = False
    """Whether a `Done` is waited for."""


@dataclass(frozen=True, slots=True)
class StepFailed:
    """From a rank: it could not compute its part of this step, and goes on with the next."""

    number: int
    message: str


@dataclass(frozen=True, slots=True)
class Stop:
    """To a rank: end."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """From a rank that has its weights."""

    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Done:
    """From a rank: it has loaded, opened its manager, or done a step that is answered."""


@dataclass(frozen=True, slots=True)
class Failed:
    """From a rank, the last that it says."""

    message: str
    is_victim: bool
    """Whether another rank is likely to be the cause: tensors could not be exchanged."""


def versions() -> dict[str, str]:
    """Of what must be the same on all ranks."""
    return {name: version(name) for name in PACKAGES}


def fingerprint(model: Any) -> str:
    """Of a model's config and weight files: names, sizes, heads and ends. Reads few bytes."""
    folder = Path(os.fspath(model))
    if folder.is_file():  # GGUF: all in one
        return _ends(hashlib.sha256(), folder).hexdigest()
    if not folder.is_dir():
        from transformers.utils.hub import cached_file

        folder = Path(str(cached_file(os.fspath(model), "config.json"))).parent
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        _ends(digest, path)
    return digest.hexdigest()


def _ends(digest: hashlib._Hash, path: Path) -> hashlib._Hash:
    size = path.stat().st_size
    digest.update(f"{path.name} {size}".encode())
    with path.open("rb") as file:
        digest.update(file.read(SAMPLE_BYTES))
        file.seek(max(0, size - SAMPLE_BYTES))
        digest.update(file.read())
    return digest
