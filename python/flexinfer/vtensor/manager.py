"""VTensorManager: owns the physical chunks and the virtual ranges of one device.

Thread-safety: all of it may be called from any thread. A tensor view keeps its memory alive.
A forked child has neither: its calls raise VTensorError, and on a CPU touching a view ends it.
Sources: vTensor (Xu et al., 2024) for the manager; PagedAttention (Kwon et al., 2023) for fork.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from flexinfer import _vtensor
from flexinfer.errors import HandoverError, OutOfMemoryError
from flexinfer.runtime.units import parse_bytes
from flexinfer.vtensor.arguments import bad_lengths, check_length, token_array
from flexinfer.vtensor.handle import VTensor
from flexinfer.vtensor.open_core import OpenCore, torch_or_dlpack
from flexinfer.vtensor.parcel import Parcel, layout_of
from flexinfer.vtensor.settings import (
    SimConfig,
    choice,
    choose_budget,
    choose_layout,
    driver_config,
    simulate,
)
from flexinfer.vtensor.spec import KVSpec


class VTensorManager(OpenCore):
    """Owns the physical chunks and the virtual ranges of one device.

    Args:
        spec: shape of the KV cache.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, or ``"sim"`` (no memory: capacity studies).
        max_requests: slots, that is vTensors alive at once.
        memory_budget: bound on physical bytes, a number or text such as ``"2GiB"``. Default: half
            of the memory that is available, see :func:`available_memory_bytes`.
        step_tokens: how many tokens a vTensor grows by at once: what windows hold beside their own
            (:meth:`bytes_for`). None: any number.
        chunk_bytes: size of one chunk, a multiple of the driver's granularity (4 KiB on the CPU,
            2 MiB on CUDA). Default: 2 MiB, less where the budget or the range is small or a row
            would hold more than 256 tokens, but no more than 16,384 chunks for that.
        unmapped: what the rest of a range does when read: ``"zero"`` or ``"guard"`` (faults).
            Default: ``"zero"``, and ``"guard"`` on CUDA and in sanitizer builds.
        scrub: zero-fill a chunk that changes hands: between any two owners (``"owner"``), between
            tenants, that is cache salts (``"tenant"``), or never (``"off"``).
        park: keep released slots mapped for the next request (deferred reclamation).
        pre_extend: let :meth:`pre_extend` map in the background; False makes it do nothing.
        alias: share prefixes by mapping; False copies them, as a baseline.
        dedup: when a prefix is recorded that was computed twice, map both onto one set of chunks.
        min_free_bytes: clean free bytes that the worker keeps ready (eager allocation); see
            :meth:`set_busy`.
        max_free_bytes: free bytes beyond which the worker gives chunks back, no less than
            `min_free_bytes`; None: it keeps them.
        prefix_cache_bytes: bytes that no vTensor uses, of recorded prefixes and parked slots, those
            kept ready included, beyond which they are reused, the least recently used first, before
            any chunk is created; None: only when the budget is full.
        prefix_cache_fraction: the same bound as a part of the budget, with which it changes. Of the
            two the lesser counts.
        swap_space: bound on host bytes of swapped-out vTensors, a number or text; 0: no swapping.
        swap_directory: where swapped KV goes, as an unlinked file; None: host memory.
        sim: what the simulated device is like; only for ``device="sim"``.
        from_dlpack: applied to each tensor view. Default: ``torch.from_dlpack`` where torch is
            installed, else the bare DLPack object; ``numpy.from_dlpack`` works as well.
    """

    def __init__(
        self,
        spec: KVSpec,
        device: str = "cpu",
        *,
        max_requests: int = 64,
        memory_budget: int | str | None = None,
        chunk_bytes: int | str | None = None,
        step_tokens: int | None = None,
        unmapped: Literal["zero", "guard"] | None = None,
        scrub: Literal["owner", "tenant", "off"] = "owner",
        park: bool = True,
        pre_extend: bool = True,
        alias: bool = True,
        dedup: bool = True,
        min_free_bytes: int | str = 0,
        max_free_bytes: int | str | None = None,
        prefix_cache_bytes: int | str | None = None,
        prefix_cache_fraction: float = 1.0,
        swap_space: int | str = 0,
        swap_directory: str | None = None,
        sim: SimConfig | None = None,
        from_dlpack: Callable[[Any], Any] | None = None,
    ) -> None:
        self._closed = True  # until it is open
        self._from_dlpack = from_dlpack or torch_or_dlpack
        driver = driver_config(device, unmapped)
        if sim is not None:
            if driver.kind != "sim":
                raise ValueError(f"sim is for device='sim', got device={device!r}")
            simulate(sim, driver)
        options = _vtensor.ManagerOptions()
        options.max_requests = max_requests
        budget = options.memory_budget = choose_budget(memory_budget)
        options.chunk_bytes, self.spec = choose_layout(chunk_bytes, spec, driver, budget)
        if step_tokens is not None:
            options.step_tokens = check_length(step_tokens)
        options.scrub = choice(_vtensor.ScrubPolicy, scrub, "scrub")
        options.park = park
        options.pre_extend = pre_extend
        options.alias = alias
        options.dedup = dedup
        options.min_free_bytes = parse_bytes(min_free_bytes, "min_free_bytes")
        if max_free_bytes is not None:
            options.max_free_bytes = parse_bytes(max_free_bytes, "max_free_bytes")
        if prefix_cache_bytes is not None:
            options.prefix_cache_bytes = parse_bytes(prefix_cache_bytes, "prefix_cache_bytes")
        options.prefix_cache_fraction = prefix_cache_fraction
        options.swap_space_bytes = parse_bytes(swap_space, "swap_space")
        options.swap_directory = swap_directory or ""
        self.chunk_bytes: int = options.chunk_bytes
        self.max_requests = max_requests
        self.step_tokens = step_tokens
        self._core = self._open(driver, options)
        self._closed = False

    def _open(
        self, driver: _vtensor.DriverConfig, options: _vtensor.ManagerOptions
    ) -> _vtensor.Manager:
        return _vtensor.Manager.open(driver, self.spec.core(), options)

    # ------------------------------------------------------------------------------- vTensors

    def create(
        self,
        tokens: Any = None,
        *,
        cache_salt: str = "",
        max_cached_tokens: int | None = None,
        expected_tokens: int = 0,
        to_export: bool = False,
        label: str | None = None,
    ) -> VTensor:
        """A vTensor that aliases the longest recorded prefix of ``tokens``.

        Args:
            tokens: token ids (list, or int32 buffer); None for an empty vTensor without sharing.
            cache_salt: tenant; prefixes are shared only within one.
            max_cached_tokens: bound on the match; an engine, which must compute at least the last
                prompt token, passes ``len(tokens) - 1``.
            expected_tokens: how long it will become, if known: chooses the fitting parked slot.
            to_export: its KV goes where :meth:`export` need not copy it, into fresh memory of its
                own, which costs page faults where other KV reuses memory.
            label: what it is called in a trace, such as a request id; see :meth:`label`.

        Where the only slots left were released and a running step may read them, it waits for that
        step. Raises OutOfMemoryError when no slot is left, ValueError for more than max_seq_len
        tokens.
        """
        vtensor = self.try_create(
            tokens,
            cache_salt=cache_salt,
            max_cached_tokens=max_cached_tokens,
            expected_tokens=expected_tokens,
            to_export=to_export,
            label=label,
            wait=True,
        )
        if vtensor is None:
            raise self._no_slot()
        return vtensor

    def try_create(
        self,
        tokens: Any = None,
        *,
        cache_salt: str = "",
        max_cached_tokens: int | None = None,
        expected_tokens: int = 0,
        to_export: bool = False,
        label: str | None = None,
        wait: bool = False,
    ) -> VTensor | None:
        """As :meth:`create`; None when no slot is left. Waits for a step only where it may."""
        wanted = token_array(() if tokens is None else tokens)
        if max_cached_tokens is not None:
            wanted = wanted[: max(0, max_cached_tokens)]
        expected = check_length(expected_tokens)
        created = self._core.try_create(wanted, cache_salt, expected, to_export, wait)
        if created is None:
            return None
        vtensor = VTensor(self, created)  # first: it releases itself should its label be refused
        if label is not None:
            self._core.label(created, label)
        return vtensor

    def _ids(self, vtensors: Sequence[VTensor]) -> list[int]:
        ids = [vtensor.id for vtensor in vtensors if vtensor._manager is self]
        if len(ids) != len(vtensors):
            stranger = next(vtensor for vtensor in vtensors if vtensor._manager is not self)
            raise LookupError(f"{stranger!r} belongs to another manager")
        return ids

    def extend(self, vtensors: Sequence[VTensor], num_tokens: Sequence[int]) -> None:
        """Extend many vTensors in one call, all or none. Raises OutOfMemoryError."""
        self.extend_ids(self._ids(vtensors), num_tokens)

    def try_extend(self, vtensors: Sequence[VTensor], num_tokens: Sequence[int]) -> bool:
        """As :meth:`extend`; False, with nothing changed, when memory is short."""
        return self.try_extend_ids(self._ids(vtensors), num_tokens)

    def pre_extend(self, vtensors: Sequence[VTensor], num_tokens: Sequence[int]) -> None:
        """Map ahead of the next step in the background. Never fails, never waits."""
        ids = self._ids(vtensors)
        try:
            self._core.pre_extend(ids, num_tokens)
        except TypeError:
            raise bad_lengths(num_tokens) from None

    def set_busy(self, busy: bool) -> None:
        """Say whether steps run; none do at first. While they do, the worker keeps a quarter of
        `min_free_bytes` ready, and fills up when they are over: creating chunks takes a core.
        """
        self._core.set_busy(busy)

    def forget(self, vtensors: Sequence[VTensor], num_tokens: Sequence[int]) -> None:
        """Say that all queries to come of ``vtensors[i]`` are at token ``num_tokens[i]`` or later.

        What lies behind their windows then (:attr:`KVGroup.window`) goes back to the pool, in the
        background and once the steps that may read it are over. Addresses and positions stay; what
        is read there is as `unmapped` says. Never fails, never waits; where no group has a window
        nothing happens.
        """
        self.forget_ids(self._ids(vtensors), num_tokens)

    def shared_ranges(
        self, vtensors: Sequence[VTensor], num_tokens: Sequence[int]
    ) -> list[tuple[int, int, int, tuple[int, ...]]]:
        """What these vTensors hold in the same chunks, of the first ``num_tokens[i]`` of each.

        Each is (slot to read from, start, end, members): tokens [start, end), whole chunks, are the
        same memory in all members, ascending indices into ``vtensors``. A forest as in
        ChunkAttention (section 3.1), parents first; the ranges of one vTensor touch each other and
        stand in order. Layers with a window are left out: these are not to read there. Cheap enough
        for every step. Raises ValueError for a vTensor that is swapped out or shorter than that.
        """
        ids = self._ids(vtensors)
        try:
            return self._core.shared_ranges(ids, num_tokens)
        except TypeError:
            raise bad_lengths(num_tokens) from None

    def begin_step(self) -> None:
        """Say that a step's kernels are about to be issued; see :meth:`end_step`."""
        self._core.begin_step()

    def end_step(self, stream: int = 0) -> None:
        """Say that all kernels of the step have been issued to ``stream`` (a CUDA stream's handle).

        Until they are over, nothing that they may read is unmapped, remapped or reused, released
        or not. Needed only where kernels run later than they are called, as on CUDA.
        """
        self._core.end_step(stream)

    def drain(self) -> None:
        """Wait until the background worker has nothing left to do."""
        self._core.drain()

    # ------------------------------------------------------------------------------- prefixes

    def match_prefix(self, tokens: Any, cache_salt: str = "") -> int:
        """Length of the longest recorded prefix of ``tokens``; marks it as used now."""
        return self._core.match_prefix(token_array(tokens), cache_salt)

    def pin_prefix(
        self, tokens: Any, owner: str, ttl_s: float | None = None, cache_salt: str = ""
    ) -> int:
        """Keep the longest recorded prefix of ``tokens`` from eviction, for ``ttl_s`` seconds or
        until :meth:`unpin_prefix`. Returns its length. Raises ValueError for 0 seconds or less."""
        if ttl_s is not None and not ttl_s > 0:
            raise ValueError(f"ttl_s must be a positive number of seconds, got {ttl_s!r}")
        return self._core.pin_prefix(token_array(tokens), owner, ttl_s or 0.0, cache_salt)

    def unpin_prefix(self, owner: str) -> int:
        """Drop the pins of ``owner``; returns how many there were."""
        return self._core.unpin_prefix(owner)

    def reset_prefix_cache(self) -> int:
        """Forget every prefix that is not pinned. Returns the number of tokens forgotten."""
        return self._core.reset_prefix_cache()

    # ------------------------------------------------------------------------------- hand-over

    @property
    def layout(self) -> str:
        """Which parcels fit."""
        return layout_of(self.spec, self.chunk_bytes)

    def export(self, vtensor: VTensor) -> Parcel:
        """The KV of a vTensor for another process here. Only what shares files with others' KV is
        copied. It stays, and goes on in a copy of its last row. Raises OutOfMemoryError, ValueError
        where it is empty, swapped out or has views, or the device cannot hand memory over."""
        (vtensor_id,) = self._ids([vtensor])
        core = self._core.try_export(vtensor_id)
        if core is None:
            raise OutOfMemoryError("memory is short for copies of what is exported")
        return Parcel(core, self.layout)

    def export_prefix(self, tokens: Any, cache_salt: str = "") -> Parcel | None:
        """As :meth:`export`, of the longest recorded prefix of ``tokens``; None: there is none."""
        vtensor = self.create(tokens, cache_salt=cache_salt)
        try:
            return self.export(vtensor) if vtensor.num_tokens > 0 else None
        finally:
            vtensor.release()

    def adopt(self, parcel: Parcel, cache_salt: str = "") -> VTensor:
        """A vTensor of what another process has exported, in the same memory. Raises HandoverError,
        with nothing mapped, for a parcel that does not fit, OutOfMemoryError when it is short."""
        if parcel.layout != self.layout:
            raise HandoverError("the parcel's heads, dtype, layers per plane or chunk_bytes differ")
        try:
            adopted = self._core.try_adopt(parcel._open(), cache_salt)
        except ValueError as error:
            raise HandoverError(str(error)) from None
        if adopted is None:
            raise OutOfMemoryError(f"no slot or memory is left for {parcel.num_chunks} chunks")
        parcel.close()
        return VTensor(self, adopted)

    # --------------------------------------------------------------------------------- memory

    @property
    def memory_budget(self) -> int:
        """Bound on physical bytes. Setting it evicts and trims at once if it must; raises
        OutOfMemoryError, with nothing changed, when more than that is in use."""
        return self._core.memory_budget()

    @memory_budget.setter
    def memory_budget(self, budget: int | str) -> None:
        self._core.set_memory_budget(choose_budget(budget))

    def bytes_for(self, num_tokens: int, *, with_windows: bool = True) -> int:
        """Physical bytes that a fresh vTensor needs to grow to ``num_tokens`` tokens: whole chunks,
        and of layers with a window no more than these hold at a time, if any at all."""
        try:
            return self._core.bytes_for(num_tokens, with_windows)
        except TypeError:
            raise bad_lengths(num_tokens) from None

    @property
    def available_bytes(self) -> int:
        """Bytes that extend() could still have: free, parked, evictable and not yet created."""
        return self._core.available_bytes()

    @property
    def num_free_slots(self) -> int:
        """Slots that a new vTensor could have."""
        return self.stats().num_free_slots

    def evict(self, num_bytes: int) -> int:
        """Forget least recently used prefixes until ``num_bytes`` are free; returns bytes freed."""
        if num_bytes < 0:
            raise ValueError(f"num_bytes must not be negative, got {num_bytes}")
        return self._core.evict(num_bytes)

    def trim(self) -> int:
        """Give free and parked chunks back to the system; returns bytes."""
        return self._core.trim()

    def sleep(self, directory: str | None = None) -> int:
        """Give all physical memory back, contents saved; returns bytes.

        Recorded prefixes and live vTensors come back by :meth:`wake`, behind the same addresses.
        ``directory``: where the contents go, as an unlinked file; None: host memory. On a CPU that
        is the same memory, and only what is returned goes back to the system: what held no KV.
        Raises ValueError while tensor views of vTensors are alive. Where saving fails it raises,
        awake as before; where the driver does not bring back what was given up either, it is
        :attr:`asleep`, and :meth:`wake` may be repeated.
        """
        return self._core.sleep(directory or "")

    def wake(self) -> None:
        """Undo :meth:`sleep`. Raises OutOfMemoryError, still asleep, when memory is short."""
        try:
            self._core.wake()
        except OutOfMemoryError:
            if self.on_shortage is None or not self.on_shortage():
                raise
            self._core.wake()

    @property
    def asleep(self) -> bool:
        """Whether the manager is between :meth:`sleep` and :meth:`wake`."""
        return self._core.is_asleep()

    # --------------------------------------------------------------------------------- tracing

    def label(self, vtensor: VTensor, text: str) -> None:
        """Name a vTensor in the trace, for example by its request id. Cheap while none is open."""
        self._core.label(vtensor.id, text)
