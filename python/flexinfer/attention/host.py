"""Attention on the CPU by our own kernel (cpp/kernels/), one call per layer for a batch.

The kernel stores the step's keys and values and attends over the arena, prefills and decodes
mixed; keys that requests share are read once for all of them (ChunkAttention, section 3.2; the
ranges come with the metadata). What can be prepared once per step is a plan, so that a layer is one
call of a few addresses. Threads are torch's own: see `flexinfer.runtime.openmp`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from flexinfer import _kernels
from flexinfer.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    AttentionOptions,
    KernelCall,
    LayerKV,
)
from flexinfer.attention.segments import Segment, SharedRange
from flexinfer.attention.sharing_cost import SharingCost
from flexinfer.runtime.activations import empty_activation
from flexinfer.runtime.kernels import DTYPES, KV_FORMATS
from flexinfer.runtime.openmp import start_threads_address

logger = logging.getLogger(__name__)

HEAD_DIM_STEP, MAX_HEAD_DIM = 16, 576
UNLIMITED = 2**63 - 1

# What computing a shared range once saves and costs, in the terms of `SharingCost`: measured with
# one thread of a Xeon (Sapphire Rapids) on 2026-11-21, docs/two_phase.md.
SAVED_ELEMENTS_PER_US = 16000.0
CALL_US = 2.0
MERGE_US = 1.0
MAX_SHARING_TOKENS = 16
"""As in kernels/plan.cpp: segments with more new tokens read shared keys by themselves."""


def unsupported_reason(layers: Sequence[LayerKV]) -> str | None:
    """Why the host kernel cannot work on these layers, or None if it can."""
    for layer in layers:
        k, v = layer.k, layer.v
        if k.device.type != "cpu":
            return f"the KV arena is on {k.device}, not on the CPU"
        if layer.dtype not in DTYPES:
            return f"dtype {str(layer.dtype).removeprefix('torch.')} is not supported"
        for head_dim in (layer.key_dim, layer.value_dim):
            if head_dim % HEAD_DIM_STEP or head_dim > MAX_HEAD_DIM:
                return (
                    f"head size {head_dim} is not a multiple of {HEAD_DIM_STEP} up to "
                    f"{MAX_HEAD_DIM}"
                )
        if k.shape[:3] != v.shape[:3] or (k.dtype, k.device) != (v.dtype, v.device):
            return "a layer's K and V differ in dtype, slots, tokens or heads"
        if k.stride(3) != 1 or v.stride(3) != 1:
            return "the rows of K or V are not dense"
    return None


class HostAttention(AttentionBackend):
    """REQUIRES: layers for which `unsupported_reason` is None. Holds the arena's addresses.

    Not thread-safe. Raises ValueError for layers or a step that the kernel does not take.
    """

    def __init__(self, layers: Sequence[LayerKV], isa: str = "") -> None:
        """isa: instruction set, one of `available_isas()`; "": FLEXINFER_SIMD, or the best."""
        super().__init__(layers)
        reason = unsupported_reason(layers)
        if reason is not None:
            raise ValueError(f"the host attention kernel cannot be used: {reason}")
        self._layers = make_layers(layers, isa)
        self._planned_for: AttentionMetadata | None = None
        self._plans: dict[tuple[int | None, ...], _kernels.Plan] = {}

    @property
    def isa(self) -> str:
        """The instruction set that is used."""
        return self._layers[0].kernel.isa

    @property
    def takes_padding(self) -> bool:
        return True

    @property
    def sharing_cost(self) -> SharingCost:
        k, v = self.layers[0].k, self.layers[0].v
        element_bytes = k.element_size()
        return SharingCost(
            token_bytes=k.shape[2] * (k.shape[3] + v.shape[3]) * element_bytes,
            bytes_per_us=SAVED_ELEMENTS_PER_US * element_bytes,
            call_us=CALL_US,
            merge_us=MERGE_US,
            max_query_tokens=MAX_SHARING_TOKENS,
        )

    def forward(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        layer = self._layers[layer_idx]
        num_heads, num_tokens, key_dim = query.shape
        plan = self._plan(metadata, layer, num_heads, options)
        query, key, value = self._rows(query), self._rows(key), self._rows(value)
        layer.check(query, key, value, plan.num_tokens + metadata.num_padding)
        sinks = options.sinks
        if sinks is not None:
            if sinks.shape != (num_heads,) or not sinks.is_cpu:
                raise ValueError(
                    f"sinks are {tuple(sinks.shape)} on {sinks.device}; expected [{num_heads}], "
                    "one for each query head, on the CPU"
                )
            sinks = sinks.detach().to(torch.float32).contiguous()
        output = empty_activation((num_tokens, num_heads, layer.value_dim), query.dtype)
        if metadata.num_padding:
            output[plan.num_tokens :] = 0
        layer.kernel.forward(
            plan,
            layer.index,
            query.data_ptr(),
            query.stride(0),
            query.stride(1),
            key.data_ptr() if layer.stores else 0,
            key.stride(0),
            key.stride(1),
            value.data_ptr() if layer.stores_values else 0,
            value.stride(0),
            value.stride(1),
            output.data_ptr(),
            *_of_scores(options, key_dim),
            0 if sinks is None else sinks.data_ptr(),
        )
        return output

    def kernel_call(
        self,
        layer_idx: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        options: AttentionOptions,
        metadata: AttentionMetadata,
    ) -> KernelCall | None:
        layer, sinks = self._layers[layer_idx], options.sinks
        if not (
            layer.key_dim == layer.value_dim == head_dim
            and layer.dtype == dtype
            and layer.stores == layer.stores_values
            and (sinks is None or _are_readable(sinks, num_heads))
        ):
            return None
        plan = self._plan(metadata, layer, num_heads, options)
        scores = _of_scores(options, head_dim)
        address = 0 if sinks is None else sinks.data_ptr()  # the caller keeps it
        arguments = (layer.kernel, plan, layer.index, layer.stores, *scores, address)
        return KernelCall(arguments, plan.num_tokens + metadata.num_padding)

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.stride(2) == 1 else tensor.contiguous()

    def _plan(
        self,
        metadata: AttentionMetadata,
        layer: HostLayer,
        num_heads: int,
        options: AttentionOptions,
    ) -> _kernels.Plan:
        """The step's plan; layers with different windows or heads have different ones."""
        if metadata is not self._planned_for:
            self._planned_for = metadata
            self._plans.clear()
        num_threads, num_kv_heads = torch.get_num_threads(), layer.num_kv_heads
        key = (num_kv_heads, num_heads, options.sliding_window, options.chunk, num_threads)
        plan = self._plans.get(key)
        if plan is None:
            hides_any = metadata.shared and options.hides_any(max(s.end for s in metadata.segments))
            shared = () if hides_any else metadata.shared
            plan = make_plan(
                metadata.segments,
                shared,
                num_kv_heads,
                num_heads,
                options,
                num_threads,
                metadata.wanted_rows,
            )
            self._plans[key] = plan
        return plan


def _are_readable(sinks: torch.Tensor, num_heads: int) -> bool:
    """Whether a kernel may read them where they are."""
    is_whole = sinks.shape == (num_heads,) and sinks.is_contiguous()
    return is_whole and sinks.dtype == torch.float32 and sinks.is_cpu


def _of_scores(options: AttentionOptions, key_dim: int) -> tuple[float, float]:
    """Scaling and softcap, as the kernel takes them."""
    scaling = key_dim**-0.5 if options.scaling is None else options.scaling
    return scaling, options.softcap or 0.0


@dataclass(frozen=True, slots=True)
class HostLayer:
    """A layer as its kernel takes it."""

    kernel: _kernels.HostAttention
    index: int
    """Among the layers of that kernel."""
    max_seq_len: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    stores: bool
    stores_values: bool

    def check(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, num_tokens: int
    ) -> None:
        """The kernel trusts its addresses: what it will read must be there."""
        if (
            key.shape != (self.num_kv_heads, num_tokens, self.key_dim)
            or value.shape != (self.num_kv_heads, num_tokens, self.value_dim)
            or query.shape[1:] != (num_tokens, self.key_dim)
            or not query.dtype == key.dtype == value.dtype == self.dtype
            or not (query.is_cpu and key.is_cpu and value.is_cpu)
        ):
            shapes = ", ".join(
                f"{tuple(t.shape)} {t.dtype} on {t.device}" for t in (query, key, value)
            )
            raise ValueError(
                f"query, key and value are {shapes}; expected [heads, {num_tokens}, "
                f"{self.key_dim}], values of width {self.value_dim}, with {self.num_kv_heads} KV "
                f"heads of {self.dtype} on the CPU"
            )


def make_layers(layers: Sequence[LayerKV], isa: str) -> list[HostLayer]:
    """Layers of one shape have one kernel."""
    kinds = [kind_of(layer) for layer in layers]
    addresses: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
    for kind, layer in zip(kinds, layers, strict=True):
        addresses.setdefault(kind, []).append((layer.k.data_ptr(), layer.v.data_ptr()))
    kernels = {
        kind: _kernels.HostAttention(
            _kernels.ArenaShape(*kind), of_kind, start_threads_address(), isa
        )
        for kind, of_kind in addresses.items()
    }
    return [
        HostLayer(
            kernels[kind],
            kinds[:i].count(kind),
            max_seq_len=layer.k.shape[1],
            num_kv_heads=layer.k.shape[2],
            key_dim=layer.key_dim,
            value_dim=layer.value_dim,
            dtype=layer.dtype,
            stores=layer.stores,
            stores_values=layer.stores_values,
        )
        for i, (kind, layer) in enumerate(zip(kinds, layers, strict=True))
    ]


def kind_of(layer: LayerKV) -> tuple[Any, ...]:
    """The arguments of `_kernels.ArenaShape`."""
    k, v = layer.k, layer.v
    shape = (*k.shape[:3], layer.key_dim, layer.value_dim)
    format_id = KV_FORMATS["auto" if layer.format is None else layer.format.name]
    return (DTYPES[layer.dtype], *shape, k.stride()[:3], v.stride()[:3], format_id)


def host_or_sdpa(layers: Sequence[LayerKV]) -> AttentionBackend:
    """The host kernel over `layers`; SDPA, with a warning that says why, where it cannot work."""
    reason = unsupported_reason(layers)
    if reason is None:
        return HostAttention(layers)
    from flexinfer.attention.sdpa import SdpaAttention

    logger.warning("attention by torch's SDPA, not by the host kernel: %s", reason)
    return SdpaAttention(layers)


def make_plan(
    given: Sequence[Segment],
    shared: Sequence[SharedRange],
    num_kv_heads: int,
    num_heads: int,
    options: AttentionOptions,
    num_threads: int,
    wanted_rows: Sequence[int] | None = None,
) -> _kernels.Plan:
    """The plan of a step. Raises ValueError if its segments and shared ranges contradict."""
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are not a multiple of {num_kv_heads} KV heads")
    segments = np.array([(s.slot, s.row, s.start, s.end) for s in given], dtype=np.int64)
    return _kernels.Plan(
        segments.reshape(-1, 4),
        shared,
        num_kv_heads,
        num_heads // num_kv_heads,
        options.sliding_window or UNLIMITED,
        num_threads,
        options.chunk or UNLIMITED,
        None if wanted_rows is None else list(wanted_rows),
    )
