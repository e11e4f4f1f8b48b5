"""Attention over pages through a block table, for the measured baseline: an engine's backend.

What reads the table, the best first:

    flash-attn's flash_attn_with_kvcache    pages of 256 tokens
    torch's own flash kernel, from 2.12 on  pages of 256 tokens
    the Triton kernel of ../kernels         any page; a prompt's prefix is gathered first
    torch's SDPA over gathered pages        any page; for CPUs, and never for a comparison

`OnRanges` is that Triton kernel on vTensors, with no table: the like-for-like partner of the third.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from contiguous import NotSupported
from pages import PagedManager
from torch.nn.functional import scaled_dot_product_attention
from triton_kernel import check_usable, choose_splits, decode

from flexinfer.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    AttentionOptions,
    LayerKV,
    store_decodes,
)
from flexinfer.attention.flash import FlashAttention, FreshPrompts
from flexinfer.attention.flash_kernels import DecodeKernel, DecodeStep, Scores
from flexinfer.attention.torch_flash import TorchFlash
from flexinfer.runtime.transfer import to_device

FLASH_PAGE_TOKENS = 256
"""FlashAttention 2 takes multiples of it."""


class PagedKernel(ABC):
    """Calls over k, v [num_pages, page_tokens, num_kv_heads, head_dim]; scores are scaled by
    head_dim ** -0.5, without window or cap."""

    name: str

    @abstractmethod
    def decode(
        self,
        q: torch.Tensor,
        layer: LayerKV,
        table: torch.Tensor,
        lengths: torch.Tensor,
        max_len: int,
    ) -> torch.Tensor:
        """q: [batch, heads, dim], as what is returned; table: [batch, pages] int32; lengths:
        [batch] int32, none above `max_len`."""

    @abstractmethod
    def prefixed(
        self, q: torch.Tensor, layer: LayerKV, table: torch.Tensor, end: int
    ) -> torch.Tensor:
        """The last tokens of one request of `end` tokens; q: [num_tokens, heads, dim], as what is
        returned; table: [1, pages] int32."""

    def fresh(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_len: int,
    ) -> torch.Tensor:
        """Whole prompts, packed, on their own keys. The same for all: torch's flash kernel."""
        return TorchFlash().fresh(q, k, v, cu_seqlens, max_len, _scores(q))


class FlashPages(PagedKernel):
    """The package flash-attn. Raises ImportError, AttributeError if there is none."""

    name = "flash-attn"

    def __init__(self) -> None:
        self._attend: Any = importlib.import_module("flash_attn").flash_attn_with_kvcache

    def decode(
        self,
        q: torch.Tensor,
        layer: LayerKV,
        table: torch.Tensor,
        lengths: torch.Tensor,
        max_len: int,
    ) -> torch.Tensor:
        # The kernel splits its work by the table's width.
        shown = table[:, : -(-max_len // layer.k.shape[1])]
        output: torch.Tensor = self._attend(
            q[:, None], layer.k, layer.v, cache_seqlens=lengths, block_table=shown, causal=True
        )
        return output[:, 0]

    def prefixed(
        self, q: torch.Tensor, layer: LayerKV, table: torch.Tensor, end: int
    ) -> torch.Tensor:
        lengths = torch.full((1,), end, dtype=torch.int32, device=q.device)
        output: torch.Tensor = self._attend(
            q[None], layer.k, layer.v, cache_seqlens=lengths, block_table=table, causal=True
        )
        return output[0]


class TorchPages(PagedKernel):
    """The flash kernel that torch ships. Raises NotSupported where it knows no block table."""

    name = "torch"

    def __init__(self) -> None:
        self._forward: Any = torch.ops.aten._flash_attention_forward.default
        if "block_table" not in str(self._forward._schema):
            raise NotSupported(f"torch {torch.__version__} has no block table in its flash kernel")

    def decode(
        self,
        q: torch.Tensor,
        layer: LayerKV,
        table: torch.Tensor,
        lengths: torch.Tensor,
        max_len: int,
    ) -> torch.Tensor:
        starts = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
        return self._call(q, layer, table, lengths, starts, 1, max_len)

    def prefixed(
        self, q: torch.Tensor, layer: LayerKV, table: torch.Tensor, end: int
    ) -> torch.Tensor:
        starts = to_device([0, q.shape[0]], torch.int32, q.device)
        ends = to_device([end], torch.int32, q.device)
        return self._call(q, layer, table, ends, starts, q.shape[0], end)

    def _call(
        self,
        q: torch.Tensor,
        layer: LayerKV,
        table: torch.Tensor,
        lengths: torch.Tensor,
        starts: torch.Tensor,
        max_q: int,
        max_k: int,
    ) -> torch.Tensor:
        # Where requests start among the keys says the table; its argument only has to be there.
        output: torch.Tensor = self._forward(
            q,
            layer.k,
            layer.v,
            starts,
            starts,
            max_q,
            max_k,
            0.0,
            True,
            False,
            seqused_k=lengths,
            block_table=table,
        )[0]
        return output


class TritonPages(PagedKernel):
    """The decode kernel of ../kernels. Raises NotSupported where Triton cannot run."""

    name = "triton"

    def __init__(self, device: torch.device) -> None:
        check_usable(device)

    def decode(
        self,
        q: torch.Tensor,
        layer: LayerKV,
        table: torch.Tensor,
        lengths: torch.Tensor,
        max_len: int,
    ) -> torch.Tensor:
        splits = choose_splits(q.device, q.shape[0], layer.k.shape[2], max_len)
        return decode(q, layer.k, layer.v, table, lengths, layer.k.shape[1], splits)

    def prefixed(
        self, q: torch.Tensor, layer: LayerKV, table: torch.Tensor, end: int
    ) -> torch.Tensor:
        return _dense(q, *_gather(layer, table[0], end))

    def fresh(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_len: int,
    ) -> torch.Tensor:
        if q.is_cuda:
            return super().fresh(q, k, v, cu_seqlens, max_len)
        ends = cu_seqlens.tolist()
        runs = [slice(*pair) for pair in pairwise(ends)]
        return torch.cat([_dense(q[run], k[run], v[run]) for run in runs])


class PlainPages(TritonPages):
    """Gathered pages, request by request."""

    name = "gather"

    def __init__(self, device: torch.device) -> None:
        pass

    def decode(
        self,
        q: torch.Tensor,
        layer: LayerKV,
        table: torch.Tensor,
        lengths: torch.Tensor,
        max_len: int,
    ) -> torch.Tensor:
        ends = lengths.tolist()
        rows = range(len(ends))
        return torch.cat([self.prefixed(q[i : i + 1], layer, table[i:], ends[i]) for i in rows])


class PagedAttention(AttentionBackend):
    """Stores a step's KV by one scatter, as paged engines do, and attends through the table."""

    def __init__(
        self, layers: Sequence[LayerKV], manager: PagedManager, kernel: PagedKernel
    ) -> None:
        super().__init__(layers)
        self._manager = manager
        self._kernel = kernel
        self._step: tuple[AttentionMetadata, Any] | None = None

    @property
    def name(self) -> str:
        return self._kernel.name

    @property
    def supports_graphs(self) -> bool:
        return True

    def forward(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        assert options == AttentionOptions(scaling=options.scaling), "plain scores only"
        layer = self.layers[layer_idx]
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        rows, table, lengths, fresh = self._of_step(metadata, q.device)
        for pages, new in ((layer.k, k), (layer.v, v)):
            pages.view(-1, *pages.shape[2:]).index_copy_(0, rows, new.contiguous())
        num_decodes = metadata.num_decodes
        output = q.new_empty(q.shape)
        if num_decodes:
            max_len = max(s.end for s in metadata.segments[:num_decodes])
            decodes = q[:num_decodes]
            output[:num_decodes] = self._kernel.decode(decodes, layer, table, lengths, max_len)
        for run in fresh.runs:
            own = slice(run.first_row, run.end_row)
            output[own] = self._kernel.fresh(q[own], k[own], v[own], run.cu_seqlens, run.max_len)
        for s in fresh.others:
            own = slice(s.row, s.row + s.num_tokens)
            whole = self._manager.table[s.slot : s.slot + 1]
            output[own] = self._kernel.prefixed(q[own], layer, whole, s.end)
        return output

    def _of_step(self, metadata: AttentionMetadata, device: torch.device) -> Any:
        """Made once per step, for all layers: where its rows go among those of all pages, its
        decodes' pages and lengths, and its prompts."""
        if self._step is None or self._step[0] is not metadata:
            size = self._manager.page_tokens
            slots, positions = metadata.decode_slots, metadata.decode_positions
            table = self._manager.table[slots]
            pages = table.gather(1, (positions // size)[:, None])[:, 0]
            parts = [pages.long() * size + positions % size]
            for s in metadata.segments[metadata.num_decodes :]:
                tokens = torch.arange(s.start, s.end, device=device)
                parts.append(self._manager.table[s.slot][tokens // size] * size + tokens % size)
            lengths = (positions + 1).to(torch.int32)
            fresh = FreshPrompts.of(metadata, device)
            self._step = (metadata, (torch.cat(parts), table, lengths, fresh))
        return self._step[1]


class OnRanges(DecodeKernel):
    """The Triton kernel on the arena. From the slot of the batch's first request on: what lies
    before may not be mapped, and Triton asks the driver about the address."""

    name = "triton"
    has_softcap = False

    def __init__(self, device: torch.device) -> None:
        check_usable(device)

    def decode(
        self,
        layer: LayerKV,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        step: DecodeStep,
        scores: Scores,
    ) -> torch.Tensor:
        store_decodes(layer, key, value, metadata)
        first = metadata.segments[0].slot
        splits = choose_splits(query.device, query.shape[0], layer.k.shape[2], step.max_end)
        slots = (step.slots - first)[:, None]
        return decode(query, layer.k[first:], layer.v[first:], slots, step.ends, 0, splits)


def on_ranges(layers: Sequence[LayerKV]) -> FlashAttention:
    """Our engine's backend with that kernel; prompts go to torch's flash kernel, as they do by
    default."""
    return FlashAttention(layers, OnRanges(layers[0].k.device), TorchFlash())


def _scores(q: torch.Tensor) -> Scores:
    return Scores.of(AttentionOptions(), q.shape[2])


def _gather(layer: LayerKV, table: torch.Tensor, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[end, num_kv_heads, head_dim] each, copied."""
    pages = table[: -(-end // layer.k.shape[1])]
    return layer.k[pages].flatten(0, 1)[:end], layer.v[pages].flatten(0, 1)[:end]


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The last tokens of one request over all its keys; [tokens, heads, dim] each."""
    if q.is_cuda:
        return TorchFlash().prefixed(q, k, v, _scores(q))
    seen = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).tril(k.shape[0] - q.shape[0])
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)[0].transpose(0, 1)
