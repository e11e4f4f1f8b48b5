"""Decodes over latents (MLA) by DeepSeek's FlashMLA, on contiguous ranges.

The kernel reads a request's latents as pages of 64 tokens that a table names, and whole ones: TMA
copies a tile, whatever length it is told. A contiguous range is such pages side by side. Its last
page may have no memory behind the last token, so the kernel is never shown it: its tokens go
through torch, and both parts are merged by their log-sum-exps.

    tokens of a request   | page | page | page | 1 to 64 tokens |
                           FlashMLA, one call    torch, one call for all requests

Prefills, windows, soft caps and sinks go through SDPA. Never run on a GPU so far: what is known of
the kernel is its source (github.com/deepseek-ai/FlashMLA, csrc/sm90/decode/dense).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch

from flexinfer.attention.base import AttentionMetadata, AttentionOptions, LayerKV, store_kv
from flexinfer.attention.flash_kernels import require
from flexinfer.attention.sdpa import SdpaAttention
from flexinfer.attention.torch_flash import count_rows_per_slot
from flexinfer.attention.two_phase import Rows, index_rows, merge_partial

PAGE = 64
"""Tokens; the kernel knows no other pages."""
WIDTHS = (576, 512)
"""Of a key and of a value, in numbers: those of DeepSeek-V2 and V3."""
KERNEL_DTYPES = (torch.float16, torch.bfloat16)
CAPABILITY = (9, 0)
ALIGNMENT = 16
"""Bytes: addresses and strides of TMA."""


class FlashMla:
    """The functions of the package `flash_mla`. Older versions give `get_mla_metadata` tensors to
    plan by, newer ones an empty plan, which the first call fills: both take these arguments."""

    def __init__(self, module: Any, version: str = "") -> None:
        self.name = f"FlashMLA {version}".rstrip()
        self._metadata = module.get_mla_metadata
        self._attend = require(
            module.flash_mla_with_kvcache,
            ("k_cache", "block_table", "cache_seqlens", "head_dim_v", "softmax_scale", "causal"),
        )

    def plan(self, lengths: torch.Tensor, num_heads: int) -> Any:
        """For calls with these very lengths, [requests] int32."""
        return self._metadata(lengths, num_heads, 1)

    def decode(
        self,
        query: torch.Tensor,
        pages: torch.Tensor,
        step: PagedDecodes,
        plan: Any,
        scaling: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """query: [requests, heads, key width]; pages: [pages, PAGE, 1, key width]. Returns
        [requests, heads, value width] and the natural log-sum-exp [requests, heads] float32."""
        output, lse = self._attend(
            query[:, None].contiguous(),
            pages,
            step.table,
            step.lengths,
            WIDTHS[1],
            *plan,
            softmax_scale=scaling,
            causal=False,
        )
        return output[:, 0], lse[..., 0]


@dataclass(frozen=True, slots=True)
class PagedDecodes:
    """The decodes of one step that have whole pages before their last one. The arena is a list of
    pages that overlap: one starts every `unit` tokens, so that each slot begins with one."""

    rows: Rows
    """Which decodes."""
    first_slot: int
    """The list begins here: its page 0 is one of a request, and has memory."""
    unit: int
    num_pages: int
    """Shown of the list: none after these is asked for."""
    table: torch.Tensor
    """[requests, pages] int32: numbers in the list; 0 behind a request's last."""
    lengths: torch.Tensor
    """[requests] int32: tokens in whole pages."""

    @classmethod
    def of(cls, metadata: AttentionMetadata, rows_per_slot: int) -> PagedDecodes | None:
        """None if no decode has a whole page before its last one."""
        decodes = metadata.segments[: metadata.num_decodes]
        counts = {i: (s.end - 1) // PAGE for i, s in enumerate(decodes) if s.end > PAGE}
        if not counts:
            return None
        unit = gcd(PAGE, rows_per_slot)
        first_slot = min(decodes[i].slot for i in counts)
        last_starts = [
            (decodes[i].slot - first_slot) * rows_per_slot + (count - 1) * PAGE
            for i, count in counts.items()
        ]
        rows = index_rows(list(counts), metadata.decode_slots.device)
        num_pages = metadata.decode_positions[rows] // PAGE
        column = torch.arange(max(counts.values()), device=num_pages.device)
        slots = (metadata.decode_slots[rows] - first_slot)[:, None]
        table = slots * (rows_per_slot // unit) + column * (PAGE // unit)
        table = table.masked_fill(column >= num_pages[:, None], 0)
        return cls(
            rows,
            first_slot,
            unit,
            max(last_starts) // unit + 1,
            table.to(torch.int32),
            (num_pages * PAGE).to(torch.int32),
        )

    def show(self, arena: torch.Tensor) -> torch.Tensor:
        """The list over an arena [slots, tokens, 1, width], not copied: [pages, PAGE, 1, width]."""
        slot_stride, token_stride, head_stride, _ = arena.stride()
        return arena.as_strided(
            (self.num_pages, PAGE, *arena.shape[2:]),
            (self.unit * token_stride, token_stride, head_stride, 1),
            arena.storage_offset() + self.first_slot * slot_stride,
        )


class FlashMlaAttention(SdpaAttention):
    """REQUIRES: `unsupported` has nothing to say of the layers."""

    def __init__(self, layers: Sequence[LayerKV], kernel: FlashMla) -> None:
        super().__init__(layers)
        self._kernel = kernel
        self._rows_per_slot = count_rows_per_slot(layers[0].k)
        self._step: tuple[AttentionMetadata, LastTokens, PagedDecodes | None] | None = None
        self._plan: Any = None

    @property
    def name(self) -> str:
        return f"decode: {self._kernel.name}, prefill: torch's SDPA"

    def forward(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        num_decodes = metadata.num_decodes
        if num_decodes == 0 or not is_plain(options):
            return super().forward(layer_idx, query, key, value, options, metadata)
        layer = self.layers[layer_idx]
        store_kv(layer, key, value, metadata)
        num_heads, num_tokens, _ = query.shape
        output = query.new_empty(num_tokens, num_heads, layer.value_dim)
        decodes = query.transpose(0, 1)[:num_decodes]
        output[:num_decodes] = self._decodes(layer, decodes, options, metadata)
        others = range(num_decodes, len(metadata.segments))
        self.attend_segments(layer, query, output, others, options, metadata)
        return output

    def _decodes(
        self,
        layer: LayerKV,
        query: torch.Tensor,
        options: AttentionOptions,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """query: [num_decodes, num_heads, key width]. Returns float32 as wide as a value."""
        if self._step is None or self._step[0] is not metadata:
            paged = PagedDecodes.of(metadata, self._rows_per_slot)
            self._plan = paged and self._kernel.plan(paged.lengths, query.shape[1])
            self._step = metadata, LastTokens.of(metadata), paged
        _, last, paged = self._step
        scaling = query.shape[2] ** -0.5 if options.scaling is None else options.scaling
        output, lse = last.attend(layer, query, scaling)
        if paged is not None:
            pages = paged.show(layer.k)
            part = self._kernel.decode(query[paged.rows], pages, paged, self._plan, scaling)
            merge_partial(output, lse, paged.rows, *part)
        return output


@dataclass(frozen=True, slots=True)
class LastTokens:
    """The last page of each decode: 1 to 64 tokens, its own among them."""

    slots: torch.Tensor
    """[num_decodes, 1] int64"""
    tokens: torch.Tensor
    """[num_decodes, PAGE] int64; behind the last one, the last one again."""
    is_behind: torch.Tensor
    """[num_decodes, 1, PAGE]"""

    @classmethod
    def of(cls, metadata: AttentionMetadata) -> LastTokens:
        positions = metadata.decode_positions[:, None]
        tokens = positions // PAGE * PAGE + torch.arange(PAGE, device=positions.device)
        is_behind = (tokens > positions)[:, None]
        return cls(metadata.decode_slots[:, None], tokens.minimum(positions), is_behind)

    def attend(
        self, layer: LayerKV, query: torch.Tensor, scaling: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """query: [num_decodes, num_heads, key width]. Returns the output and the log-sum-exp
        [num_decodes, num_heads], both float32."""
        keys = layer.k[self.slots, self.tokens][:, :, 0].float()
        scores = torch.matmul(query.float(), keys.transpose(1, 2)) * scaling
        scores = scores.masked_fill(self.is_behind, -torch.inf)
        lse = scores.logsumexp(-1)
        weights = torch.exp(scores - lse[..., None])
        return torch.matmul(weights, keys[..., : layer.value_dim]), lse


def unsupported(layers: Sequence[LayerKV], capability: tuple[int, int]) -> str | None:
    """Why FlashMLA cannot decode over these layers on such a GPU; None if it can."""
    k = layers[0].k
    if capability != CAPABILITY:
        return f"FlashMLA decodes on Hopper (compute capability 9.0), not on {capability}"
    if any(layer.k.data_ptr() != layer.v.data_ptr() for layer in layers):
        return "FlashMLA knows layers of latents alone, and this model has others beside them"
    if any(layer.k.shape != k.shape or layer.k.stride() != k.stride() for layer in layers):
        return "FlashMLA is tried for latents of one shape and stride, and this model has several"
    widths = (k.shape[3], layers[0].v.shape[3])
    if widths != WIDTHS:
        return f"FlashMLA knows keys and values of {WIDTHS} numbers, not of {widths}"
    if k.dtype not in KERNEL_DTYPES:
        return f"FlashMLA knows float16 and bfloat16, not {str(k.dtype)[6:]}"
    if any(layer.k.data_ptr() % ALIGNMENT for layer in layers) or any(
        stride * k.element_size() % ALIGNMENT for stride in k.stride()[:3]
    ):
        return f"FlashMLA reads rows that begin at multiples of {ALIGNMENT} bytes"
    if count_rows_per_slot(k) == 0:
        return "FlashMLA needs slots that are whole numbers of token strides"
    return None


def is_plain(options: AttentionOptions) -> bool:
    """Whether a token sees all tokens before it, by its scores alone."""
    is_whole = options.sliding_window is None and options.chunk is None
    return is_whole and options.softcap is None and options.sinks is None
