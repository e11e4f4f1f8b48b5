"""Settings of a VTensorManager, from what callers say to what the core takes: its device, sizes."""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import Any, Literal

from flexinfer import _vtensor
from flexinfer.runtime.units import parse_bytes
from flexinfer.vtensor.planes import lasting_planes
from flexinfer.vtensor.spec import KVSpec

HUGE_PAGE_BYTES = 2 << 20
_DEFAULT_BUDGET_FRACTION = 0.5
_MAX_CHUNKS = 16_384
"""Of which a default makes smaller chunks: each is a mapping at least, of which a process may have
65,530 and the driver takes three quarters, and a shared one is several."""

MAX_ROW_TOKENS = 256
"""Tokens per row beyond which short requests hold many times what they need."""

_ROWS_PER_WINDOW = 16
"""With a default: a window holds up to a row more than its tokens at either end."""

_MAX_COLUMNS = 64
"""Chunks of a row in one plane, beyond which no shorter row is looked for."""

_MAP_COUNT = Path("/proc/sys/vm/max_map_count")

_logger = logging.getLogger(__name__)


def available_memory_bytes() -> int:
    """Bytes that this machine, or the container around this process, can still give."""
    return int(_vtensor.available_bytes())


@dataclass(frozen=True)
class SimConfig:
    """What ``device="sim"`` simulates.

    Attributes:
        latency: ``"none"``, or ``"a100"`` for the published costs of CUDA's calls at 2 MiB.
        real_time: calls really take that long; otherwise it is only counted, in all times that
            :class:`Stats` and traces tell.
        capacity: bytes of the device; None: the manager's budget is the only bound.
        granularity: bytes that chunk sizes are multiples of.
    """

    latency: Literal["none", "a100"] = "none"
    real_time: bool = False
    capacity: int | str | None = None
    granularity: int = 4096


def simulate(sim: SimConfig, config: _vtensor.DriverConfig) -> None:
    """Have the driver be what ``sim`` says. Raises ValueError for settings that make no sense."""
    if sim.latency not in ("none", "a100"):
        raise ValueError(f"latency is one of 'none', 'a100', got {sim.latency!r}")
    config.a100_latency = sim.latency == "a100"
    config.real_time = sim.real_time
    config.granularity_bytes = sim.granularity
    if sim.capacity is not None:
        config.capacity_bytes = parse_bytes(sim.capacity, "capacity")


def choice(enum: Any, name: str, argument: str) -> Any:
    try:
        return getattr(enum, name.upper())
    except AttributeError:
        known = ", ".join(repr(str(member.name).lower()) for member in enum)
        raise ValueError(f"{argument} is one of {known}, got {name!r}") from None


def driver_config(device: str, unmapped: str | None) -> _vtensor.DriverConfig:
    match = re.fullmatch(r"(cpu|sim|cuda)(?::(\d+))?", str(device))
    if match is None:
        raise ValueError(f"device is 'cpu', 'cuda', 'cuda:N' or 'sim', got {device!r}")
    config = _vtensor.DriverConfig()
    config.kind = "host" if match[1] == "cpu" else match[1]
    config.device_index = int(match[2] or 0)
    if match[1] == "cuda":
        unmapped = unmapped or "guard"
    if unmapped is not None:
        config.unmapped = choice(_vtensor.UnmappedPolicy, unmapped, "unmapped")
    return config


def choose_budget(memory_budget: int | str | None) -> int:
    if memory_budget is None:
        return int(available_memory_bytes() * _DEFAULT_BUDGET_FRACTION)
    budget = parse_bytes(memory_budget, "memory_budget")
    if budget < 1:
        raise ValueError(f"memory_budget must be positive, got {memory_budget!r}")
    return budget


def choose_layout(
    chunk_bytes: int | str | None, spec: KVSpec, driver: _vtensor.DriverConfig, budget: int
) -> tuple[int, KVSpec]:
    """The chunk size, and the spec with planes that suit it. Warns where a row holds more than
    MAX_ROW_TOKENS and smaller chunks are possible."""
    size = choose_chunk_bytes(chunk_bytes, spec, driver, budget)
    fitted = shorten_rows(spec, size)
    row_tokens = size // fitted.plane_token_bytes
    if row_tokens > MAX_ROW_TOKENS and size > driver.granularity_bytes:
        _logger.warning(
            "a chunk of %d bytes holds %d tokens of a plane: a request of 16 tokens takes what %d "
            "would. Use smaller chunks (chunk_bytes) or more layers per plane (now %d)",
            size,
            row_tokens,
            row_tokens,
            fitted.layers_per_plane,
        )
    return size, fitted


def choose_chunk_bytes(
    chunk_bytes: int | str | None, spec: KVSpec, driver: _vtensor.DriverConfig, budget: int
) -> int:
    """The chunk size asked for, or a default.

    The default is 2 MiB, halved until a row holds no more than MAX_ROW_TOKENS, unless the budget
    would be more than 16,384 chunks before; until it holds no more than a sixteenth of the smallest
    window, unless these would be more than the system allows mappings for; and until the budget
    holds 64 chunks per plane and a range one chunk. On CUDA it is 2 MiB, the granularity.
    """
    if chunk_bytes is not None:
        size = parse_bytes(chunk_bytes, "chunk_bytes")
        if size < 1:
            raise ValueError(f"chunk_bytes must be positive, got {chunk_bytes!r}")
        return size
    return _default_chunk_bytes(spec, driver, budget)


def shorten_rows(spec: KVSpec, chunk_bytes: int) -> KVSpec:
    """The spec, with room left over in the planes of windows where a request then holds less.

    A row holds as many tokens as fit in a chunk of the planes' greatest common divisor, and a
    window holds up to a row more than its tokens. 52 layers and 10 have 2 in common, 55 and 10 have
    5: where a row is more than a sixteenth of the window, room for three layers that do not exist
    is less than what the shorter row saves. Planes that keep all have none to spare.
    """
    lasting = [plane.token_bytes for plane in lasting_planes(spec.groups)]
    if not lasting or not spec.windows:
        return spec
    if chunk_bytes * _ROWS_PER_WINDOW <= spec.windows[0] * spec.plane_token_bytes:
        return spec
    longest = gcd(*lasting)
    units = (longest // columns for columns in range(1, _MAX_COLUMNS) if longest % columns == 0)
    padded = (_padded(spec, unit) for unit in units if unit > spec.plane_token_bytes)
    return min((spec, *padded), key=lambda made: _held_bytes(made, chunk_bytes))


def _padded(spec: KVSpec, unit: int) -> KVSpec:
    """Planes of windows that hold all layers of a group made multiples of `unit` bytes a token."""
    groups = []
    for group in spec.groups:
        if group.window is not None and group.layers_per_plane == len(group.layers):
            step = unit // gcd(unit, group.layer_bytes)
            room = -(-len(group.layers) // step) * step
            group = replace(group, layers_per_plane=room)
        groups.append(group)
    return replace(spec, mixed=tuple(groups), layers_per_plane=groups[0].layers_per_plane)


def _held_bytes(spec: KVSpec, chunk_bytes: int) -> float:
    """Of a long request, but for the tokens of layers that keep all: windows, a row, its state."""
    row_tokens = chunk_bytes / spec.plane_token_bytes
    kept = sum(of.token_bytes * ((of.window or 0) + row_tokens) for of in spec.retentions())
    return kept + spec.state_bytes(chunk_bytes)


def _default_chunk_bytes(spec: KVSpec, driver: _vtensor.DriverConfig, budget: int) -> int:
    size = HUGE_PAGE_BYTES
    if driver.kind == "cuda":
        return size
    range_bytes = spec.max_seq_len * spec.plane_token_bytes
    limit = min(budget // (64 * spec.row_chunks), range_bytes)
    token_bytes = spec.plane_token_bytes
    limit = min(limit, max(MAX_ROW_TOKENS * token_bytes, budget // _MAX_CHUNKS))
    if spec.windows:
        row_bytes = spec.windows[0] // _ROWS_PER_WINDOW * token_bytes
        limit = min(limit, max(row_bytes, budget // _max_window_chunks()))
    while size > limit and size > 4096:
        size //= 2
    return size


def _max_window_chunks() -> int:
    """A quarter of the mappings that the system allows a process, where that is more."""
    with suppress(OSError, ValueError):
        return max(_MAX_CHUNKS, int(_MAP_COUNT.read_text()) // 4)
    return _MAX_CHUNKS


def choose_layers_per_plane(spec: KVSpec, chunk_bytes: int) -> int:
    """The fewest layers per plane with which a row holds no more than MAX_ROW_TOKENS; all, where
    none is enough."""
    layer_bytes = spec.bytes_per_token // (2 * spec.num_layers)  # of K, or V, of one token
    for layers in range(1, spec.num_layers):
        planes_bytes = layer_bytes * (1 if layers == 1 else 2 * layers)
        if spec.num_layers % layers == 0 and chunk_bytes // planes_bytes <= MAX_ROW_TOKENS:
            return layers
    return spec.num_layers
