"""Managers of a small KV cache, and vTensors with known contents, for tests of `flexinfer.vtensor`.

A test module uses the fixture `kv_device`, and has one of its own that yields from
`checked_manager`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flexinfer.vtensor import KVSpec, VTensor, VTensorManager
from helpers import device_param as kv_device

CHUNK = 4096
TOKENS_PER_CHUNK = 4  # 2 layers x 2 x 2 heads x 32 dims x 4 bytes = 1 KiB a token

PROMPT = list(range(10))  # two whole chunks and a half


def spec_of(**changes: Any) -> KVSpec:
    sizes = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 32, "max_seq_len": 64, **changes}
    return KVSpec(**sizes)


def open_manager(spec: KVSpec | None = None, **options: Any) -> VTensorManager:
    defaults = {"max_requests": 4, "memory_budget": 64 * CHUNK, "chunk_bytes": CHUNK}
    options = {**defaults, **kv_device.options(), **options}
    return VTensorManager(spec or spec_of(), **options)


def checked_manager() -> Iterator[VTensorManager]:
    """For a fixture: a manager whose invariants hold when the test is over."""
    with open_manager() as manager:
        yield manager
        if not manager.closed:
            manager.check_integrity()


def filled(manager: VTensorManager, tokens: list[int], value: float = 1, salt: str = "") -> VTensor:
    """A vTensor of ``tokens`` with ``value`` in the K and V of every token it had to compute."""
    vtensor = manager.create(tokens, cache_salt=salt)
    vtensor.extend(len(tokens))
    for layer in range(manager.spec.num_layers):
        vtensor.k(layer)[vtensor.num_cached_tokens :] = value
        vtensor.v(layer)[vtensor.num_cached_tokens :] = -value
    return vtensor
