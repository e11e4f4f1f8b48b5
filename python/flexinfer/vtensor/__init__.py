"""The vTensor Manager for Python: contiguous KV ranges, mapped just in time, prefixes shared.

Usable alone, without torch::

    spec = KVSpec(num_layers=2, num_kv_heads=2, head_dim=64, dtype="float32", max_seq_len=4096)
    with VTensorManager(spec, max_requests=8, memory_budget="64MiB") as manager:
        request = manager.create(prompt)  # aliases the longest recorded prefix
        request.extend(len(prompt))  # the first n tokens are backed by memory
        keys = request.k(layer=0)  # zero-copy [tokens, heads, dim]
        request.record_prefix(prompt)  # later requests share it
        request.release()

Thread-safety: all of it may be called from any thread. A tensor view keeps its memory alive.
Sources: vTensor (Xu et al., 2024) for the manager; PagedAttention (Kwon et al., 2023) for fork.
"""

from flexinfer._vtensor import (
    ChunkInfo,
    DriverCalls,
    MappingTimes,
    PrefixInfo,
    Snapshot,
    Stats,
    VTensorInfo,
)
from flexinfer.runtime.units import parse_bytes
from flexinfer.vtensor.groups import KVGroup
from flexinfer.vtensor.handle import VTensor
from flexinfer.vtensor.manager import VTensorManager
from flexinfer.vtensor.open_core import NO_CHUNK, kept_chunks
from flexinfer.vtensor.parcel import Parcel
from flexinfer.vtensor.settings import SimConfig, available_memory_bytes
from flexinfer.vtensor.spec import KVSpec
from flexinfer.vtensor.state import StateGroup, StateLayout, StateTensor

__all__ = [
    "NO_CHUNK",
    "ChunkInfo",
    "DriverCalls",
    "KVGroup",
    "KVSpec",
    "MappingTimes",
    "Parcel",
    "PrefixInfo",
    "SimConfig",
    "Snapshot",
    "StateGroup",
    "StateLayout",
    "StateTensor",
    "Stats",
    "VTensor",
    "VTensorInfo",
    "VTensorManager",
    "available_memory_bytes",
    "kept_chunks",
    "parse_bytes",
]
