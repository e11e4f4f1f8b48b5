"""Where the KV stands: one torch.empty tensor, or the arena of a vTensor manager in some layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from card import fitting, usable_bytes
from contiguous import NotSupported
from problem import Problem, Shape, make_queries

from flexinfer.vtensor import KVSpec, VTensorManager


@dataclass(frozen=True)
class Layout:
    """How the KV of a layer lies in memory."""

    name: str
    layers_per_plane: int | None = None
    """None: no vTensor at all, a tensor of torch's own."""
    chunk_bytes: int = 2 << 20

    @property
    def is_plain(self) -> bool:
        return self.layers_per_plane is None


class Source:
    """KV of one layer, random, as [slots, tokens, num_kv_heads, head_dim]; request i in slot i."""

    left_out: tuple[Shape, ...] = ()
    """For want of memory."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self.dtype = dtype
        self.device = device

    def caches(self, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def problem(self, shape: Shape) -> Problem:
        """The shape's requests with fresh queries."""
        k, v = self.caches(shape)
        return Problem(shape, make_queries(shape, self.dtype, self.device), k, v)


class PlainSource(Source):
    """A tensor of the size that the shape needs, from torch's allocator."""

    def caches(self, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
        size = (shape.batch, shape.seq_len, shape.num_kv_heads, shape.head_dim)
        k, v = (torch.empty(size, dtype=self.dtype, device=self.device) for _ in range(2))
        return k.normal_(), v.normal_()


class ArenaSource(Source):
    """One layer of a manager's arena; all layers are mapped, as in an engine."""

    def __init__(
        self, manager: VTensorManager, shapes: Sequence[Shape], dtype: torch.dtype, device: str
    ) -> None:
        super().__init__(dtype, device)
        self._vtensors = [manager.create() for _ in range(max(s.batch for s in shapes))]
        if [vtensor.slot for vtensor in self._vtensors] != list(range(len(self._vtensors))):
            raise RuntimeError("a fresh manager did not hand its slots out in order")
        self._manager = manager
        layer = manager.spec.num_layers // 2
        self._k, self._v = manager.k(layer), manager.v(layer)

    def release(self, slot: int) -> None:
        """Nothing is behind this slot from now on."""
        if self._k.is_cuda:
            torch.cuda.synchronize()  # what has filled it may still run: no step was declared
        self._vtensors[slot].release()
        self._manager.trim()

    def caches(self, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
        for vtensor in self._vtensors[: shape.batch]:
            vtensor.extend(max(shape.seq_len, vtensor.num_tokens))
        # Cut to what is mapped: FlashAttention-3 loads up to the end of the shape, and kernels that
        # split the keys do so by the shape, which is to be that of the plain tensor.
        k, v = (cache[: shape.batch, : shape.seq_len] for cache in (self._k, self._v))
        return k.normal_(), v.normal_()


@contextmanager
def open_source(
    layout: Layout, shapes: Sequence[Shape], num_layers: int, device: str, dtype: torch.dtype
) -> Iterator[Source]:
    """The layout's KV, with room for the shapes that the card holds; all layers of these are
    mapped, as in an engine."""
    if layout.layers_per_plane is None:
        yield PlainSource(dtype, device)
        return
    spec = KVSpec(
        num_layers=num_layers,
        num_kv_heads=shapes[0].num_kv_heads,
        head_dim=shapes[0].head_dim,
        dtype=str(dtype),
        max_seq_len=max(shape.seq_len for shape in shapes),
        layers_per_plane=layout.layers_per_plane,
    )
    taken, left_out = fitting(
        shapes, partial(needed_bytes, spec, chunk_bytes=layout.chunk_bytes), usable_bytes(device)
    )
    if not taken:
        raise NotSupported(f"no shape's KV fits: the smallest has {shapes[0]}")
    manager = VTensorManager(
        spec,
        device,
        max_requests=max(shape.batch for shape in taken),
        memory_budget=needed_bytes(spec, taken, layout.chunk_bytes),
        chunk_bytes=layout.chunk_bytes,
    )
    try:
        source = ArenaSource(manager, taken, dtype, device)
        source.left_out = left_out
        yield source
        if device == "cuda":
            torch.cuda.synchronize()
    finally:
        manager.close()


def needed_bytes(spec: KVSpec, shapes: Sequence[Shape], chunk_bytes: int) -> int:
    """Slot i holds the longest of the shapes that use it, in whole rows of chunks."""
    total = 0
    for slot in range(max(shape.batch for shape in shapes)):
        tokens = max(shape.seq_len for shape in shapes if shape.batch > slot)
        chunks = -(-tokens * spec.plane_token_bytes // chunk_bytes)
        total += chunks * chunk_bytes * spec.num_planes
    return total
