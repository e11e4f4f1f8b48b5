"""Interface of attention implementations, and what they are told about a step.

A step is a flat batch: the tokens of all its requests one after the other, without padding.

    decodes (one token each)      prefills (chunks of any length)
    | r0 | r1 | r2 | ... |        |    r7    |       r8        | ...
    0    1    2    3     num_decodes         ...               num_tokens

KV stands in the arena: of request i, token j is row [slot_i, j] of each layer's K and V.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from flexinfer.attention.kv_format import KVFormat
from flexinfer.attention.segments import Segment, SharedRange
from flexinfer.attention.sharing_cost import SharingCost
from flexinfer.runtime.kernels import SCALE_BYTES


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The arena of one layer. Strided: only the last dimension is sure to be dense."""

    k: torch.Tensor
    """[max_requests, max_seq_len, num_kv_heads, key_dim]"""
    v: torch.Tensor
    """[max_requests, max_seq_len, num_kv_heads, value_dim], dtype and device as `k`. Of a latent
    (MLA) it is a part of `k`."""
    stores: bool = True
    """False: a layer before this one has the same K and V, and stores them."""
    chunk: int | None = None
    """A token sees only those of its own chunk of so many tokens (Llama 4)."""
    window: int | None = None
    """The layer's sliding window, where its calls do not tell it (Phi-3.5-MoE)."""
    format: KVFormat | None = None
    """How numbers stand in `k` and `v`, which then are rows of uint8, scales included."""

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values that come."""
        return self.k.dtype if self.format is None else self.format.dtype

    @property
    def key_dim(self) -> int:
        return self.k.shape[3] - (0 if self.format is None else SCALE_BYTES)

    @property
    def value_dim(self) -> int:
        return self.v.shape[3] - (0 if self.format is None else SCALE_BYTES)

    @property
    def stores_values(self) -> bool:
        """Whether V is to be stored beside K."""
        return self.stores and self.k.data_ptr() != self.v.data_ptr()


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step: `segments` in the order of the batch, one-token segments first."""

    segments: Sequence[Segment]
    num_decodes: int
    """How many segments, all at the front, have one token."""
    decode_slots: torch.Tensor
    """[num_decodes] int64, on the arena's device."""
    decode_positions: torch.Tensor
    """[num_decodes] int64."""
    shared: Sequence[SharedRange] = ()
    """What to compute once for several segments: of what `VTensorManager.shared_ranges` finds, what
    `choose_ranges` in sharing_cost.py takes. A forest, parents first: the ranges of one segment
    start at token 0, touch each other and stand in order. For layers that hide no token of the step
    from any of its segments: what a window has left is not there to be read."""
    num_padding: int = 0
    """Rows after those of the segments that belong to no request: they have no KV, and attend to
    nothing."""
    wanted_rows: Sequence[int] | None = None
    """Rows whose output is read; None: all. Keys and values of all rows are stored, and the output
    of other rows may be anything."""

    @classmethod
    def build(
        cls,
        segments: Sequence[Segment],
        device: torch.device,
        shared: Sequence[SharedRange] = (),
    ) -> AttentionMetadata:
        num_decodes = sum(1 for segment in segments if segment.num_tokens == 1)
        decodes = segments[:num_decodes]
        return cls(
            segments=segments,
            num_decodes=num_decodes,
            decode_slots=torch.tensor([s.slot for s in decodes], dtype=torch.int64, device=device),
            decode_positions=torch.tensor(
                [s.start for s in decodes], dtype=torch.int64, device=device
            ),
            shared=shared,
        )


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What a layer asks for besides plain causal attention."""

    scaling: float | None = None
    """Factor of the scores; None: key_dim ** -0.5."""
    sliding_window: int | None = None
    """A token sees itself and the `sliding_window - 1` tokens before it."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap)."""
    sinks: torch.Tensor | None = None
    """[num_heads]: a score for each head that takes part in the softmax and has no value."""
    chunk: int | None = None
    """See `LayerKV.chunk`."""

    def hides_any(self, num_tokens: int) -> bool:
        """Whether, of so many tokens, the last one does not see the first."""
        return self.first_visible(num_tokens - 1) > 0

    def first_visible(self, position: int) -> int:
        """The first token that the one at `position` sees."""
        window, chunk = self.sliding_window, self.chunk
        return max(
            0 if window is None else position + 1 - window,
            0 if chunk is None else position // chunk * chunk,
            0,
        )


class KernelCall(NamedTuple):
    """Attention of one layer in one step, for a kernel that computes more than it."""

    arguments: tuple[Any, ...]
    """Kernel, plan, layer among those of the kernel, whether it stores KV, scaling, softcap, sinks
    (an address, or 0)."""
    num_tokens: int
    """Rows of the step, with padding."""


class AttentionBackend(ABC):
    """Writes a step's KV into the arena and attends over it. Not thread-safe."""

    def __init__(self, layers: Sequence[LayerKV]) -> None:
        self.layers = layers

    @property
    def supports_graphs(self) -> bool:
        """Whether a CUDA graph of `forward` on a batch of decodes may be replayed for others: it
        then depends on tensors alone, and takes bounds, not values, from `segments`."""
        return False

    @property
    def takes_padding(self) -> bool:
        """Whether it takes `AttentionMetadata.num_padding`, with zeros as output there."""
        return False

    @abstractmethod
    def forward(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Store key and value, return the attention output.

        query: [num_heads, num_tokens, key_dim]; key, value: [num_kv_heads, num_tokens, key_dim or
        value_dim], any strides, the arena's dtype. Returns [num_tokens, num_heads, value_dim],
        contiguous.
        REQUIRES: the arena is backed for each segment up to its end.
        """

    def kernel_call(
        self,
        layer_idx: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        options: AttentionOptions,
        metadata: AttentionMetadata,
    ) -> KernelCall | None:
        """What `forward` would do with queries, keys and values of such heads, for another kernel
        to do; None: it can only be called."""
        return None

    @property
    def sharing_cost(self) -> SharingCost | None:
        """By what AttentionMetadata.shared is chosen; None: it makes no use of it."""
        return None

    @property
    def graph_sharing_cost(self) -> SharingCost | None:
        """By what a step leaves its CUDA graph in order to share; None: it never does. Known after
        a first `forward` of each layer."""
        return None


def store_kv(
    layer: LayerKV, key: torch.Tensor, value: torch.Tensor, metadata: AttentionMetadata
) -> None:
    """Write the step's KV: one scatter for all decodes, one copy for each prefill chunk.

    key, value: [num_kv_heads, num_tokens, key_dim or value_dim].
    """
    if not layer.stores:
        return
    key, value = key.transpose(0, 1), value.transpose(0, 1)
    if layer.format is not None:
        key, value = layer.format.quantise_keys(key), layer.format.quantise(value)
    store_decodes(layer, key, value, metadata)
    store_prefills(layer, key, value, metadata)


def store_decodes(
    layer: LayerKV, key: torch.Tensor, value: torch.Tensor, metadata: AttentionMetadata
) -> None:
    """The decodes' part of `store_kv`. key, value: [num_tokens, num_kv_heads, ...]."""
    num_decodes = metadata.num_decodes
    if num_decodes:
        where = (metadata.decode_slots, metadata.decode_positions)
        layer.k.index_put_(where, key[:num_decodes])
        if layer.stores_values:
            layer.v.index_put_(where, value[:num_decodes])


def store_prefills(
    layer: LayerKV, key: torch.Tensor, value: torch.Tensor, metadata: AttentionMetadata
) -> None:
    """The prefills' part of `store_kv`. key, value: [num_tokens, num_kv_heads, ...]."""
    for s in metadata.segments[metadata.num_decodes :]:
        rows = slice(s.row, s.row + s.num_tokens)
        layer.k[s.slot, s.start : s.end] = key[rows]
        if layer.stores_values:
            layer.v[s.slot, s.start : s.end] = value[rows]
