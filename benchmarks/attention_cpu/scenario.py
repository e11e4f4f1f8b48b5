"""What is timed: one layer's attention over a real KV arena, by one backend."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median

import torch

from flexinfer.attention.base import AttentionBackend, AttentionMetadata, AttentionOptions, LayerKV
from flexinfer.attention.kv_format import KVFormat
from flexinfer.attention.segments import Segment, SharedRange
from flexinfer.attention.sharing_cost import SharingCost, choose_ranges
from flexinfer.runtime.kernels import SCALE_BYTES
from flexinfer.vtensor import KVSpec, VTensorManager

CPU = torch.device("cpu")
GIB = 1 << 30


@dataclass(frozen=True)
class Shape:
    """A model's attention; as many layers as the arena is to be larger than the caches."""

    num_layers: int
    num_kv_heads: int
    group: int
    head_dim: int

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group

    def kv_bytes(self, num_tokens: int, dtype: torch.dtype) -> int:
        """Of one layer."""
        return 2 * num_tokens * self.num_kv_heads * self.head_dim * dtype.itemsize


@dataclass(frozen=True)
class Setting:
    """A batch: (tokens with KV, new tokens) of each request; the first `num_shared` are common."""

    lengths: tuple[tuple[int, int], ...]
    num_shared: int = 0


class Scenario:
    """An arena of the manager, filled with random KV, and a step over it."""

    def __init__(
        self,
        manager: VTensorManager,
        shape: Shape,
        dtype: torch.dtype,
        setting: Setting,
        *,
        alias: bool,
        kv_format: KVFormat | None = None,
    ) -> None:
        """alias: the shared prefix is one set of chunks, mapped for each request; else copies."""
        self.manager = manager
        self.shape = shape
        self.setting = setting
        prefix = list(range(1, setting.num_shared + 1))
        self.vtensors = []
        for i, (start, num_new) in enumerate(setting.lengths):
            # With a salt of its own nobody finds another's prefix.
            vtensor = manager.create(prefix or None, cache_salt="" if alias else f"request {i}")
            vtensor.extend(start + num_new)
            self.vtensors.append(vtensor)
            if i == 0 and prefix and alias:
                vtensor.record_prefix(prefix)
        self.layers = [
            LayerKV(manager.k(i), manager.v(i), format=kv_format) for i in range(shape.num_layers)
        ]
        self._fill()
        segments, row = [], 0
        for vtensor, (start, num_new) in zip(self.vtensors, setting.lengths, strict=True):
            segments.append(Segment(vtensor.slot, row, start, start + num_new))
            row += num_new
        self.metadata = AttentionMetadata.build(segments, CPU)
        generator = torch.Generator().manual_seed(1)
        sizes = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        self.query, self.key, self.value = (
            torch.randn(row, heads, shape.head_dim, generator=generator).to(dtype).transpose(0, 1)
            for heads in sizes
        )

    def _fill(self) -> None:
        num_shared = self.setting.num_shared
        for i, (vtensor, lengths) in enumerate(
            zip(self.vtensors, self.setting.lengths, strict=True)
        ):
            # Aliased tokens are written once, by the first request.
            first = min(vtensor.num_cached_tokens, num_shared) if i else 0
            for layer in self.layers:
                for part in (layer.k, layer.v):
                    rows = part[vtensor.slot, first : lengths[0]]
                    if layer.format is None:
                        rows.normal_()
                    else:
                        numbers = torch.randn(*rows.shape[:-1], self.shape.head_dim)
                        rows[:] = layer.format.quantise(numbers)

    def shared_metadata(self) -> AttentionMetadata:
        """The step with its common prefix named as one shared range, in whole tokens."""
        members = tuple(range(len(self.vtensors)))
        whole = SharedRange(self.vtensors[0].slot, 0, self.setting.num_shared, members)
        return replace(self.metadata, shared=(whole,))

    def chosen_metadata(
        self, cost: SharingCost, num_trials: int
    ) -> tuple[AttentionMetadata, float]:
        """The step as the engine would run it, and the median microseconds that choosing took."""
        starts = [start for start, _ in self.setting.lengths]
        segments = self.metadata.segments
        times = []
        for _ in range(num_trials):
            begin = time.perf_counter()
            found = self.manager.shared_ranges(self.vtensors, starts)
            chosen = choose_ranges([SharedRange(*range_) for range_ in found], segments, cost)
            times.append(time.perf_counter() - begin)
        return replace(self.metadata, shared=tuple(chosen)), median(times) * 1e6

    def layer_us(self, backend: AttentionBackend, metadata: AttentionMetadata) -> float:
        """Microseconds of a layer, over one pass through all layers.

        Processor time of this thread where torch has one thread: others may be running.
        """
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        options = AttentionOptions()
        begin = clock()
        for i in range(self.shape.num_layers):
            backend.forward(i, self.query, self.key, self.value, options, metadata)
        return (clock() - begin) / self.shape.num_layers * 1e6


@contextmanager
def open_scenario(
    shape: Shape,
    dtype: torch.dtype,
    setting: Setting,
    *,
    alias: bool = True,
    layers_per_plane: int | None = None,
    kv_format: KVFormat | None = None,
) -> Iterator[Scenario]:
    """The scenario in a manager of its own, closed at the end."""
    longest = max(start + num_new for start, num_new in setting.lengths)
    spec = KVSpec(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim + (0 if kv_format is None else SCALE_BYTES),
        dtype=str(dtype if kv_format is None else torch.uint8),
        max_seq_len=longest,
        layers_per_plane=layers_per_plane,
    )
    with VTensorManager(
        spec, max_requests=len(setting.lengths), memory_budget=6 * GIB, scrub="off"
    ) as manager:
        scenario = Scenario(manager, shape, dtype, setting, alias=alias, kv_format=kv_format)
        yield scenario
        scenario.layers.clear()


def medians_us(
    runs: Sequence[tuple[Scenario, AttentionBackend, AttentionMetadata]], rounds: int
) -> list[float]:
    """Median time a layer of each run; the runs in turn, after one round that does not count."""
    times: list[list[float]] = [[] for _ in runs]
    with torch.inference_mode():
        for round_idx in range(rounds + 1):
            for taken, (scenario, backend, metadata) in zip(times, runs, strict=True):
                us = scenario.layer_us(backend, metadata)
                if round_idx:
                    taken.append(us)
    return [median(taken) for taken in times]


def copy_bandwidth() -> dict[str, float]:
    """GB/s of torch's copy (bytes read and written) and of its sum (bytes read), 256 MB."""
    source = torch.ones(64 << 20)
    target = torch.empty_like(source)
    num_bytes = source.numel() * source.element_size()
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best = {"copy": 0.0, "read": 0.0}
    for _ in range(6):
        begin = clock()
        target.copy_(source)
        middle = clock()
        source.sum()
        end = clock()
        best["copy"] = max(best["copy"], 2 * num_bytes / (middle - begin) / 1e9)
        best["read"] = max(best["read"], num_bytes / (end - middle) / 1e9)
    return best
