"""The vTensor Manager. Use it through flexinfer.vtensor."""

from collections.abc import Sequence
import enum
from typing import Annotated, Any

import numpy
from numpy.typing import NDArray


class VTensorError(Exception): ...

class OutOfMemoryError(VTensorError, MemoryError):
    asked_bytes: int
    free_bytes: int
    budget_bytes: int

class DriverError(VTensorError):
    call: str
    code: int
    code_name: str
    arguments: str

class MappingLimitError(DriverError): ...

class ReleasedError(VTensorError, LookupError): ...

class IntegrityError(VTensorError): ...

class ScrubPolicy(enum.Enum):
    OWNER = 0

    TENANT = 1

    OFF = 2

class UnmappedPolicy(enum.Enum):
    GUARD = 0

    ZERO = 1

class KVGroup:
    def __init__(self) -> None: ...

    @property
    def layers(self) -> list[int]: ...

    @layers.setter
    def layers(self, arg: Sequence[int], /) -> None: ...

    @property
    def num_kv_heads(self) -> int: ...

    @num_kv_heads.setter
    def num_kv_heads(self, arg: int, /) -> None: ...

    @property
    def key_dim(self) -> int: ...

    @key_dim.setter
    def key_dim(self, arg: int, /) -> None: ...

    @property
    def value_dim(self) -> int: ...

    @value_dim.setter
    def value_dim(self, arg: int, /) -> None: ...

    @property
    def element_bytes(self) -> int: ...

    @element_bytes.setter
    def element_bytes(self, arg: int, /) -> None: ...

    @property
    def layers_per_plane(self) -> int: ...

    @layers_per_plane.setter
    def layers_per_plane(self, arg: int, /) -> None: ...

    @property
    def window(self) -> int: ...

    @window.setter
    def window(self, arg: int, /) -> None: ...

class KVSpec:
    def __init__(self) -> None: ...

    @property
    def groups(self) -> list[KVGroup]: ...

    @groups.setter
    def groups(self, arg: Sequence[KVGroup], /) -> None: ...

    @property
    def max_seq_len(self) -> int: ...

    @max_seq_len.setter
    def max_seq_len(self, arg: int, /) -> None: ...

    def check(self) -> None: ...

    def num_planes(self) -> int: ...

    def row_chunks(self) -> int: ...

    def bytes_per_token(self) -> int: ...

    def token_bytes(self) -> int: ...

class DriverConfig:
    def __init__(self) -> None: ...

    @property
    def kind(self) -> str: ...

    @kind.setter
    def kind(self, arg: str, /) -> None: ...

    @property
    def device_index(self) -> int: ...

    @device_index.setter
    def device_index(self, arg: int, /) -> None: ...

    @property
    def capacity_bytes(self) -> int: ...

    @capacity_bytes.setter
    def capacity_bytes(self, arg: int, /) -> None: ...

    @property
    def unmapped(self) -> UnmappedPolicy: ...

    @unmapped.setter
    def unmapped(self, arg: UnmappedPolicy, /) -> None: ...

    @property
    def huge_pages(self) -> bool: ...

    @huge_pages.setter
    def huge_pages(self, arg: bool, /) -> None: ...

    @property
    def mapping_limit(self) -> int: ...

    @mapping_limit.setter
    def mapping_limit(self, arg: int, /) -> None: ...

    @property
    def granularity_bytes(self) -> int: ...

    @granularity_bytes.setter
    def granularity_bytes(self, arg: int, /) -> None: ...

    @property
    def a100_latency(self) -> bool: ...

    @a100_latency.setter
    def a100_latency(self, arg: bool, /) -> None: ...

    @property
    def real_time(self) -> bool: ...

    @real_time.setter
    def real_time(self, arg: bool, /) -> None: ...

class ManagerOptions:
    def __init__(self) -> None: ...

    @property
    def max_requests(self) -> int: ...

    @max_requests.setter
    def max_requests(self, arg: int, /) -> None: ...

    @property
    def memory_budget(self) -> int: ...

    @memory_budget.setter
    def memory_budget(self, arg: int, /) -> None: ...

    @property
    def chunk_bytes(self) -> int: ...

    @chunk_bytes.setter
    def chunk_bytes(self, arg: int, /) -> None: ...

    @property
    def step_tokens(self) -> int: ...

    @step_tokens.setter
    def step_tokens(self, arg: int, /) -> None: ...

    @property
    def scrub(self) -> ScrubPolicy: ...

    @scrub.setter
    def scrub(self, arg: ScrubPolicy, /) -> None: ...

    @property
    def park(self) -> bool: ...

    @park.setter
    def park(self, arg: bool, /) -> None: ...

    @property
    def pre_extend(self) -> bool: ...

    @pre_extend.setter
    def pre_extend(self, arg: bool, /) -> None: ...

    @property
    def alias(self) -> bool: ...

    @alias.setter
    def alias(self, arg: bool, /) -> None: ...

    @property
    def dedup(self) -> bool: ...

    @dedup.setter
    def dedup(self, arg: bool, /) -> None: ...

    @property
    def min_free_bytes(self) -> int: ...

    @min_free_bytes.setter
    def min_free_bytes(self, arg: int, /) -> None: ...

    @property
    def max_free_bytes(self) -> int: ...

    @max_free_bytes.setter
    def max_free_bytes(self, arg: int, /) -> None: ...

    @property
    def prefix_cache_bytes(self) -> int: ...

    @prefix_cache_bytes.setter
    def prefix_cache_bytes(self, arg: int, /) -> None: ...

    @property
    def prefix_cache_fraction(self) -> float: ...

    @prefix_cache_fraction.setter
    def prefix_cache_fraction(self, arg: float, /) -> None: ...

    @property
    def swap_space_bytes(self) -> int: ...

    @swap_space_bytes.setter
    def swap_space_bytes(self, arg: int, /) -> None: ...

    @property
    def swap_directory(self) -> str: ...

    @swap_directory.setter
    def swap_directory(self, arg: str, /) -> None: ...

class Parcel:
    def __init__(self, files: Sequence[int], places: Sequence[int], is_there: Sequence[bool], num_tokens: int, continues: bool) -> None: ...

    @property
    def files(self) -> list[int]: ...

    @property
    def places(self) -> list[int]: ...

    @property
    def is_there(self) -> list[bool]: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def continues(self) -> bool: ...

    @property
    def num_copied(self) -> int: ...

    def close(self) -> None: ...

class BlockEventKind(enum.Enum):
    STORED = 0

    REMOVED = 1

    CLEARED = 2

class BlockEvent:
    @property
    def kind(self) -> BlockEventKind: ...

    @property
    def blocks(self) -> list[int]: ...

    @property
    def parent(self) -> int | None: ...

    @property
    def tokens(self) -> list[int]: ...

    @property
    def cache_salt(self) -> str: ...

BLOCK_TOKENS: int = 16

class MappingTimes:
    @property
    def exposed_us(self) -> float: ...

    @property
    def hidden_us(self) -> float: ...

    @property
    def pre_extended_rows(self) -> int: ...

class ChunkInfo:
    @property
    def id(self) -> int: ...

    @property
    def generation(self) -> int: ...

    @property
    def refs(self) -> int: ...

    @property
    def recorded(self) -> bool: ...

    @property
    def pinned(self) -> bool: ...

    @property
    def appender(self) -> int: ...

    @property
    def sharers(self) -> list[int]: ...

class VTensorInfo:
    @property
    def id(self) -> int: ...

    @property
    def slot(self) -> int: ...

    @property
    def state(self) -> str: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_cached_tokens(self) -> int: ...

    @property
    def num_cut_tokens(self) -> int: ...

    @property
    def cut_by_window(self) -> int: ...

    @property
    def mapped_tokens(self) -> int: ...

    @property
    def mapped_bytes(self) -> int: ...

    @property
    def chunks_aliased(self) -> int: ...

    @property
    def chunks_copied(self) -> int: ...

    @property
    def table(self) -> list[int]: ...

class PrefixInfo:
    @property
    def cache_salt(self) -> str: ...

    @property
    def parent(self) -> int: ...

    @property
    def start_tokens(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def last_used(self) -> int: ...

    @property
    def first_tokens(self) -> list[int]: ...

    @property
    def chunks(self) -> list[int]: ...

    @property
    def blocks(self) -> list[int]: ...

    @property
    def pinned_by(self) -> list[str]: ...

class Snapshot:
    @property
    def chunk_bytes(self) -> int: ...

    @property
    def num_planes(self) -> int: ...

    @property
    def vtensors(self) -> list[VTensorInfo]: ...

    @property
    def chunks(self) -> list[ChunkInfo]: ...

    @property
    def prefixes(self) -> list[PrefixInfo]: ...

class DriverCalls:
    """
    Calls of one kind to the driver, and the microseconds they took; hidden_us of these were spent by the background worker.
    """

    def __init__(self, calls: int, us: float, hidden_us: float = 0.0) -> None: ...

    @property
    def calls(self) -> int: ...

    @calls.setter
    def calls(self, arg: int, /) -> None: ...

    @property
    def us(self) -> float: ...

    @us.setter
    def us(self, arg: float, /) -> None: ...

    @property
    def hidden_us(self) -> float: ...

    @hidden_us.setter
    def hidden_us(self, arg: float, /) -> None: ...

    def __getstate__(self) -> tuple[int, float, float]: ...

    def __setstate__(self, arg: tuple[int, float, float], /) -> None: ...

    def __eq__(self, arg: object, /) -> bool: ...

    def as_dict(self) -> dict[str, float]: ...

class Stats:
    """
    Numbers of a manager: bytes are of now, counts and times are totals since the start.
    """

    @property
    def prefix_queries(self) -> int: ...

    @property
    def prefix_query_tokens(self) -> int: ...

    @property
    def prefix_hit_tokens(self) -> int: ...

    @property
    def chunks_aliased(self) -> int: ...

    @property
    def chunks_copied(self) -> int: ...

    @property
    def chunks_evicted(self) -> int: ...

    @property
    def chunks_adopted(self) -> int: ...

    @property
    def chunks_deduplicated(self) -> int: ...

    @property
    def dedup_failures(self) -> int: ...

    @property
    def chunks_given_back(self) -> int: ...

    @property
    def prefix_window_tokens(self) -> int: ...

    @property
    def chunks_swapped_out(self) -> int: ...

    @property
    def chunks_swapped_in(self) -> int: ...

    @property
    def chunks_sent(self) -> int: ...

    @property
    def chunks_sent_copied(self) -> int: ...

    @property
    def chunks_received(self) -> int: ...

    @property
    def reserved_bytes(self) -> int:
        """Virtual: all arenas."""

    @property
    def mapped_bytes(self) -> int:
        """Virtual: behind live vTensors, aliases counted each time."""

    @property
    def resident_bytes(self) -> int:
        """Physical: created chunks."""

    @property
    def shared_bytes(self) -> int:
        """Physical: chunks that more than one vTensor maps."""

    @property
    def saved_bytes(self) -> int:
        """Physical: what they would take beyond that, each its own."""

    @property
    def free_bytes(self) -> int:
        """Physical: created, without reference."""

    @property
    def parked_bytes(self) -> int:
        """Virtual: mapped behind parked slots."""

    @property
    def held_bytes(self) -> int:
        """Virtual: mapped behind released vTensors with living views."""

    @property
    def recorded_bytes(self) -> int:
        """Physical: chunks of recorded prefixes."""

    @property
    def swapped_bytes(self) -> int:
        """Host: contents of swapped-out vTensors."""

    @property
    def asleep_bytes(self) -> int:
        """Host: contents of a sleeping manager."""

    @property
    def budget_bytes(self) -> int:
        """Bound on physical bytes."""

    @property
    def available_bytes(self) -> int:
        """What extend() could still have."""

    @property
    def num_vtensors(self) -> int:
        """vTensors alive."""

    @property
    def num_free_slots(self) -> int:
        """Slots free or parked."""

    @property
    def num_broken_slots(self) -> int:
        """Slots that a failing driver broke, until repaired."""

    @property
    def broken_bytes(self) -> int:
        """Virtual: what these may map."""

    @property
    def recorded_tokens(self) -> int:
        """Tokens of recorded prefixes."""

    @property
    def pre_extend_failures(self) -> int:
        """Mapping ahead of need that failed."""

    @property
    def map_us_exposed(self) -> float:
        """Microseconds that callers waited for driver work."""

    @property
    def map_us_hidden(self) -> float:
        """Microseconds of driver work of the worker."""

    @property
    def driver_calls(self) -> dict[str, DriverCalls]:
        """By the driver's operation."""

    def as_dict(self) -> dict[str, Any]:
        """All numbers as plain values, for JSON."""

class KV(enum.Enum):
    KEY = 0

    VALUE = 1

class Manager:
    @staticmethod
    def open(driver: DriverConfig, spec: KVSpec, options: ManagerOptions) -> Manager: ...

    def try_create(self, tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], cache_salt: str, expected_tokens: int = 0, to_export: bool = False, wait: bool = False) -> int | None: ...

    def try_export(self, id: int) -> Parcel | None: ...

    def try_adopt(self, parcel: Parcel, cache_salt: str) -> int | None: ...

    def try_fork(self, id: int) -> int | None: ...

    def release(self, id: int) -> None: ...

    def try_extend(self, ids: Sequence[int], num_tokens: Sequence[int]) -> bool: ...

    def extend(self, ids: Sequence[int], num_tokens: Sequence[int]) -> None: ...

    def pre_extend(self, ids: Sequence[int], num_tokens: Sequence[int]) -> None: ...

    def set_busy(self, busy: bool) -> None: ...

    def forget(self, ids: Sequence[int], num_tokens: Sequence[int]) -> None: ...

    def drain(self) -> None: ...

    def truncate(self, id: int, num_tokens: int) -> None: ...

    def begin_step(self) -> None: ...

    def end_step(self, stream: int) -> None: ...

    def record_prefix(self, id: int, tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int: ...

    def match_prefix(self, tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], cache_salt: str) -> int: ...

    def pin_prefix(self, tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], owner: str, ttl_seconds: float, cache_salt: str) -> int: ...

    def unpin_prefix(self, owner: str) -> int: ...

    def reset_prefix_cache(self) -> int: ...

    def watch_blocks(self) -> None: ...

    def unwatch_blocks(self) -> None: ...

    def retell_blocks(self) -> None: ...

    def take_block_events(self, timeout_seconds: float) -> list[BlockEvent] | None: ...

    def try_swap_out(self, id: int) -> bool: ...

    def try_swap_in(self, id: int, tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> bool: ...

    def sleep(self, directory: str) -> int: ...

    def wake(self) -> None: ...

    def is_asleep(self) -> bool: ...

    def evict(self, num_bytes: int) -> int: ...

    def trim(self) -> int: ...

    def memory_budget(self) -> int: ...

    def set_memory_budget(self, num_bytes: int) -> None: ...

    def bytes_for(self, num_tokens: int, with_windows: bool = True) -> int: ...

    def mapping_times(self) -> MappingTimes: ...

    def available_bytes(self) -> int: ...

    def start_trace(self, path: str) -> None: ...

    def stop_trace(self) -> None: ...

    def is_tracing(self) -> bool: ...

    def label(self, id: int, text: str) -> None: ...

    def resident_bytes(self) -> int: ...

    def info(self, id: int) -> VTensorInfo: ...

    def snapshot(self) -> Snapshot: ...

    def stats(self) -> Stats: ...

    def check_integrity(self) -> None: ...

    def close(self) -> None: ...

    def shared_ranges(self, ids: Sequence[int], num_tokens: Sequence[int]) -> list[tuple[int, int, int, tuple[int, ...]]]: ...

    def view(self, id: int, layer: int, which: KV, dtype: str) -> Any: ...

    def arena(self, layer: int, which: KV, dtype: str) -> Any: ...

NO_CHUNK: int = 4294967295

def available_bytes() -> int:
    """Bytes that this machine, or this container, can still give."""
