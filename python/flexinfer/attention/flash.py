"""Attention by flash attention kernels, straight on the arena of contiguous ranges.

A step has three parts, one call each where the kernels allow it:

    decodes               one call for all of them on [max_requests, max_seq_len, heads, dim]
    prompts from token 0  one packed call on the step's own keys: the arena is not read
    prompts with a prefix one call per request on its contiguous view [end, heads, dim]

Decodes that share ranges of KV may instead be computed in two phases (two_phase.py), so that each
range is read once for all of them. Which ranges are worth it is said by `sharing_cost`, and comes
with the metadata; a captured CUDA graph has none (cuda_graphs.py).

What the kernels do not know (sinks, softcap) goes to `SdpaAttention`, layer by layer, with a
warning. That unmodified FlashAttention kernels run on ranges that are mapped on demand was shown by
vAttention (Prabhu et al., 2024, section 5).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from flexinfer.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    AttentionOptions,
    LayerKV,
    store_decodes,
    store_prefills,
)
from flexinfer.attention.flash_kernels import DecodeKernel, DecodeStep, PrefillKernel, Scores
from flexinfer.attention.sdpa import SdpaAttention
from flexinfer.attention.segments import Segment
from flexinfer.attention.sharing_cost import SharingCost
from flexinfer.attention.two_phase import PartialAttention, TwoPhasePlan, attend
from flexinfer.attention.two_phase_flash import cuda_cost
from flexinfer.runtime.transfer import to_device

logger = logging.getLogger(__name__)


class FlashAttention(AttentionBackend):
    """REQUIRES: K and V of one head_dim, in float16 or bfloat16; num_heads a multiple of
    num_kv_heads."""

    def __init__(
        self,
        layers: Sequence[LayerKV],
        decode: DecodeKernel,
        prefill: PrefillKernel,
        partial: PartialAttention | None = None,
    ) -> None:
        """partial: the calls of two-phase attention; None: each decode reads all of its KV."""
        super().__init__(layers)
        self._partial = partial
        self._all_plain = True
        self._plan: tuple[AttentionMetadata, TwoPhasePlan | None] | None = None
        self._decode_kernel = decode
        self._prefill_kernel = prefill
        self._rest = SdpaAttention(layers)
        self._told: set[str] = set()
        self._step: tuple[AttentionMetadata, DecodeStep] | None = None
        self._fresh: tuple[AttentionMetadata, FreshPrompts] | None = None

    @property
    def name(self) -> str:
        return f"decode: {self._decode_kernel.name}, prefill: {self._prefill_kernel.name}"

    @property
    def supports_graphs(self) -> bool:
        """Unless some layer needs the other backend: each has been seen in a prefill by then."""
        return not self._told

    @property
    def sharing_cost(self) -> SharingCost | None:
        return None if self._partial is None else cuda_cost(self.layers[0])

    @property
    def graph_sharing_cost(self) -> SharingCost | None:
        """None where a layer has a window or a soft cap: it would lose its graph for nothing."""
        return self.sharing_cost if self._all_plain else None

    def forward(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        if options.sliding_window is not None or options.softcap is not None:
            self._all_plain = False
        missing = self._missing(options)
        if missing is not None:
            self._tell(missing)
            return self._rest.forward(layer_idx, query, key, value, options, metadata)
        layer = self.layers[layer_idx]
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        num_decodes = metadata.num_decodes
        if num_decodes == q.shape[0]:
            return self._decodes(layer, q, k, v, metadata, options).contiguous()
        output = q.new_empty(q.shape)
        if num_decodes:
            output[:num_decodes] = self._decodes(
                layer, q[:num_decodes], k[:num_decodes], v[:num_decodes], metadata, options
            )
        store_prefills(layer, k, v, metadata)
        self._prefills(layer, q, k, v, output, metadata, Scores.of(options, q.shape[2]))
        return output

    def _decodes(
        self,
        layer: LayerKV,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """All tensors: [num_decodes, heads, head_dim]."""
        plan = self._plan_for(metadata)
        if self._partial is not None and plan is not None and plan.allows(layer, options):
            store_decodes(layer, key, value, metadata)
            return attend(self._partial, plan, layer, query, options)
        if self._step is None or self._step[0] is not metadata:
            self._step = (metadata, DecodeStep.of(metadata))
        step = self._step[1]
        scores = Scores.of(options, query.shape[2])
        return self._decode_kernel.decode(layer, query, key, value, metadata, step, scores)

    def _plan_for(self, metadata: AttentionMetadata) -> TwoPhasePlan | None:
        """Made once per step, for all layers; None: no decodes share."""
        if self._partial is None or not metadata.shared:
            return None
        if self._plan is None or self._plan[0] is not metadata:
            self._plan = (metadata, TwoPhasePlan.build(metadata, all_decodes=True))
        return self._plan[1]

    def _prefills(
        self,
        layer: LayerKV,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        metadata: AttentionMetadata,
        scores: Scores,
    ) -> None:
        if self._fresh is None or self._fresh[0] is not metadata:
            self._fresh = (metadata, FreshPrompts.of(metadata, query.device))
        fresh = self._fresh[1]
        kernel = self._prefill_kernel
        for run in fresh.runs:
            rows = slice(run.first_row, run.end_row)
            output[rows] = kernel.fresh(
                query[rows], key[rows], value[rows], run.cu_seqlens, run.max_len, scores
            )
        for s in fresh.others:
            rows = slice(s.row, s.row + s.num_tokens)
            # Nothing below the window: there may be no memory.
            first = 0 if scores.window[0] < 0 else max(0, s.start - scores.window[0])
            stored = layer.k[s.slot, first : s.end], layer.v[s.slot, first : s.end]
            output[rows] = kernel.prefixed(query[rows], *stored, scores)

    def _missing(self, options: AttentionOptions) -> str | None:
        """What these layers ask for that the kernels do not have."""
        kernels: tuple[DecodeKernel | PrefillKernel, ...] = (
            self._decode_kernel,
            self._prefill_kernel,
        )
        if options.sinks is not None:
            return "attention sinks"
        if options.chunk is not None:
            return "attention within chunks"
        if options.softcap is not None and not all(kernel.has_softcap for kernel in kernels):
            return "soft-capped scores"
        return None

    def _tell(self, missing: str) -> None:
        """Once: layers of this kind are slow."""
        if missing not in self._told:
            self._told.add(missing)
            logger.warning(
                "%s: not known to %s; layers that need it attend through torch's SDPA, request by "
                "request, and without CUDA graphs",
                missing,
                self.name,
            )


class FreshRun:
    """Neighbouring prompts that all start at token 0: rows [first_row, end_row) of the batch."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        self.first_row = segments[0].row
        self.end_row = segments[-1].row + segments[-1].num_tokens
        ends = [s.row + s.num_tokens - self.first_row for s in segments]
        self.cu_seqlens = to_device([0, *ends], torch.int32, device)
        self.max_len = max(s.num_tokens for s in segments)


class FreshPrompts:
    """The prefills of a step, sorted by whether they have a prefix. The same for all layers."""

    def __init__(self, runs: list[FreshRun], others: list[Segment]) -> None:
        self.runs = runs
        self.others = others

    @classmethod
    def of(cls, metadata: AttentionMetadata, device: torch.device) -> FreshPrompts:
        runs: list[list[Segment]] = []
        others: list[Segment] = []
        for s in metadata.segments[metadata.num_decodes :]:
            if s.start > 0:
                others.append(s)
            elif runs and runs[-1][-1].row + runs[-1][-1].num_tokens == s.row:
                runs[-1].append(s)
            else:
                runs.append([s])
        return cls([FreshRun(run, device) for run in runs], others)
