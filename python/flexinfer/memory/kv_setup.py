"""KV setup: from settings and a loaded model to a vTensor manager and the longest request."""

from __future__ import annotations

import logging
import mmap
import resource
from dataclasses import replace
from math import gcd
from typing import TYPE_CHECKING

from flexinfer.config import EngineConfig
from flexinfer.errors import DriverError
from flexinfer.memory.budget import (
    KVMemory,
    choose_eager_bytes,
    choose_kv_memory,
    format_bytes,
)
from flexinfer.memory.kv_groups import kv_spec
from flexinfer.runtime.units import parse_bytes
from flexinfer.scheduler_config import DEFAULT_MAX_NUM_BATCHED_TOKENS

if TYPE_CHECKING:
    from flexinfer.models.describe import LoadedModel
    from flexinfer.vtensor import VTensorManager
    from flexinfer.vtensor.spec import KVSpec

logger = logging.getLogger(__name__)

DEFAULT_MAX_MODEL_LEN = 4096
"""For architectures that set no limit themselves."""

CUDA_CHUNK_BYTES = 2 << 20
"""Granularity of CUDA's physical memory, and the size of a chunk by default."""


CPU_IDLE_FRACTION = 1 / 8
"""Of the budget: what idle prefixes may hold on a CPU by default."""


def choose_max_model_len(config: EngineConfig, limit: int | None) -> int:
    """What the user asked for, or what the model can (`limit`); never more than that."""
    if config.max_model_len is None:
        return DEFAULT_MAX_MODEL_LEN if limit is None else limit
    if limit is not None and config.max_model_len > limit:
        raise ValueError(
            f"max_model_len is {config.max_model_len}, but the model has {limit} positions"
        )
    return config.max_model_len


def check_kv_sizes(config: EngineConfig) -> None:
    """Refuse sizes that cannot work with any model, before one is loaded. Raises ValueError."""
    if str(config.device) == "cpu":
        _check_file_size()
    unit = CUDA_CHUNK_BYTES if str(config.device).startswith("cuda") else mmap.PAGESIZE
    chunk = unit
    if config.chunk_bytes is not None:
        chunk = parse_bytes(config.chunk_bytes, "chunk_bytes")
        if chunk < 1 or chunk % unit:
            raise ValueError(
                f"chunk_bytes {config.chunk_bytes!r} is not a positive multiple of the driver's "
                f"granularity, {unit} bytes"
            )
    if config.kv_cache_memory_bytes is not None:
        budget = parse_bytes(config.kv_cache_memory_bytes, "kv_cache_memory_bytes")
        if budget < chunk:
            raise ValueError(
                f"kv_cache_memory_bytes {config.kv_cache_memory_bytes!r} is less than one chunk of "
                f"{chunk} bytes: raise it or lower chunk_bytes"
            )
    if 0 < parse_bytes(config.swap_space, "swap_space") < unit:
        raise ValueError(
            f"swap_space {config.swap_space!r} holds the KV of no request: it is in bytes, or text "
            "such as '4GiB'"
        )


def _check_file_size() -> None:
    """The host driver's memory is a file, as large as it may ever grow (host_driver.cpp)."""
    from flexinfer.vtensor import available_memory_bytes

    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    file_bytes = available_memory_bytes() // 4 * 3
    if limit != resource.RLIM_INFINITY and limit < file_bytes:
        raise ValueError(
            f"files of this process may have {format_bytes(limit)}, and KV memory is one of "
            f"{format_bytes(file_bytes)}: raise the limit (ulimit -f unlimited)"
        )


def derive_kv_memory(config: EngineConfig, loaded: LoadedModel, max_seq_len: int) -> KVMemory:
    """The budget, from the settings and what the model's device can still give."""
    if loaded.device.type != "cuda":
        from flexinfer.vtensor import available_memory_bytes

        free_bytes = available_memory_bytes() // config.tensor_parallel_size  # each rank its part
        return choose_kv_memory(config.kv_cache_memory_bytes, free_bytes)
    import torch

    from flexinfer.models.describe import warm_up

    warm_up(loaded, config.scheduler_config(max_seq_len), max_seq_len)
    free_bytes, gpu_bytes = torch.cuda.mem_get_info(loaded.device)
    return choose_kv_memory(
        config.kv_cache_memory_bytes,
        free_bytes,
        gpu_bytes=gpu_bytes,
        gpu_memory_utilization=config.gpu_memory_utilization,
    )


RESERVATIONS = ("mmap", "cuMemAddressReserve")
"""Calls of drivers by which a manager gets addresses when it is made."""
SLOTS_WITH_STATE = 3
"""Of a request: its KV, the state that a step reads and the one that it writes."""


def make_manager(
    config: EngineConfig, loaded: LoadedModel, max_seq_len: int, memory: KVMemory
) -> VTensorManager:
    """The vTensor manager for the model's KV, and its recurrent states if it keeps any."""
    from flexinfer.vtensor import VTensorManager
    from flexinfer.vtensor.settings import shorten_rows

    spec = kv_spec(loaded, max_seq_len, config.layers_per_plane, config.kv_cache_dtype)
    if loaded.device.type == "cuda":
        chunk_bytes = parse_bytes(config.chunk_bytes or CUDA_CHUNK_BYTES, "chunk_bytes")
        spec = shorten_rows(spec, chunk_bytes)
        spec = replace(spec, max_seq_len=whole_slot_tokens(spec, chunk_bytes))
    low_bytes, high_bytes = choose_eager_bytes(
        config.free_memory_low,
        config.free_memory_high,
        num_chunks=config.max_num_seqs * spec.row_chunks,
        budget=memory.budget_bytes,
    )
    try:
        return VTensorManager(
            spec,
            device=str(loaded.device),
            max_requests=config.max_num_seqs * (SLOTS_WITH_STATE if loaded.state else 1)
            # For what is on its way to or from another process.
            + (config.role != "both") * (2 if loaded.state else 1),
            memory_budget=memory.budget_bytes,
            chunk_bytes=config.chunk_bytes,
            step_tokens=_step_tokens(config),
            park=config.enable_deferred_reclamation,
            dedup=config.enable_dedup,
            min_free_bytes=low_bytes if config.eager_allocation else 0,
            max_free_bytes=high_bytes,
            prefix_cache_bytes=config.prefix_cache_memory,
            prefix_cache_fraction=_prefix_cache_fraction(config, loaded.device.type),
            swap_space=config.swap_space,
            swap_directory=config.swap_directory,
        )
    except DriverError as error:
        if error.call not in RESERVATIONS:
            raise
        raise ValueError(
            f"the addresses for {config.max_num_seqs} requests of {max_seq_len} tokens each cannot "
            f"be reserved: {_reservation_advice()} ({error})"
        ) from error


def _reservation_advice() -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return "lower max_model_len or max_num_seqs"
    return (
        f"this process may have {format_bytes(limit)} of addresses, mapped or not: raise the limit "
        "(ulimit -v unlimited), or else lower max_model_len and max_num_seqs"
    )


def _step_tokens(config: EngineConfig) -> int | None:
    """The most tokens of one request in a step; None: any number."""
    if not config.enable_chunked_prefill:
        return None
    return config.max_num_batched_tokens or max(DEFAULT_MAX_NUM_BATCHED_TOKENS, config.max_num_seqs)


def _prefix_cache_fraction(config: EngineConfig, device_type: str) -> float:
    """See `EngineConfig.prefix_cache_memory`."""
    if config.prefix_cache_memory is not None or device_type == "cuda":
        return 1.0
    return CPU_IDLE_FRACTION


def whole_slot_tokens(spec: KVSpec, chunk_bytes: int) -> int:
    """The least max_seq_len, no smaller than the spec's, with which a slot, which is whole chunks,
    is also a whole number of tokens.

    The arena is then a list of token rows at one stride from slot to slot, as packed kernels read
    it (attention/flash_kernels.py). It costs addresses, not memory.
    """
    unit = chunk_bytes // gcd(chunk_bytes, spec.plane_token_bytes)
    return -(-spec.max_seq_len // unit) * unit


def fit_max_model_len(manager: VTensorManager, wanted_len: int, config: EngineConfig) -> int:
    """The longest request that the budget holds beside its states, at most wanted_len.

    An explicit max_model_len that does not fit is refused: such a request would never end.
    """
    state_bytes = manager.spec.state_bytes(manager.chunk_bytes)
    if config.enable_prefix_caching:
        state_bytes *= 2  # one may be kept as a snapshot while the next is written
    low, high = 0, wanted_len
    while low < high:
        middle = (low + high + 1) // 2
        if manager.bytes_for(middle) + state_bytes <= manager.memory_budget:
            low = middle
        else:
            high = middle - 1
    if low == wanted_len:
        return wanted_len
    if low < 2 or config.max_model_len is not None:
        raise ValueError(
            f"the KV budget of {manager.memory_budget} bytes holds one request of {low} tokens; "
            f"{wanted_len} tokens need {manager.bytes_for(wanted_len) + state_bytes} bytes"
            f"{_of_which_state(state_bytes)}: raise kv_cache_memory_bytes or lower max_model_len"
        )
    logger.warning(
        "max_model_len is %d, not the model's %d: the KV budget of %d bytes holds no more",
        low,
        wanted_len,
        manager.memory_budget,
    )
    return low


def _of_which_state(state_bytes: int) -> str:
    return f", {state_bytes} of them for its recurrent state" if state_bytes else ""
