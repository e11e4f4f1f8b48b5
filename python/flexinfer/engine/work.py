"""Work: the arithmetic and the bytes that a part of a step cannot do without."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flexinfer.attention.base import AttentionMetadata, AttentionOptions, LayerKV
from flexinfer.attention.segments import Segment


@dataclass(slots=True)
class Work:
    flops: float = 0.0
    """A product and a sum count as two."""
    num_bytes: float = 0.0
    """Read from memory: weights and KV; what a step itself writes and reads is small."""

    def add(self, other: Work) -> None:
        self.flops += other.flops
        self.num_bytes += other.num_bytes


def linear_work(module: Any, x: torch.Tensor) -> Work:
    """x [..., inputs] times a weight, which is read once. Modules that are no single product
    have none: that of the layers in them counts."""
    if not hasattr(module, "out_features"):
        return Work()
    num_weights = module.in_features * module.out_features
    num_rows = x.numel() // module.in_features
    num_bytes = getattr(module, "nbytes", None) or num_weights * module.weight.element_size()
    return Work(2.0 * num_rows * num_weights, num_bytes)


def attention_work(
    layer: LayerKV, query: torch.Tensor, options: AttentionOptions, metadata: AttentionMetadata
) -> Work:
    """query [num_heads, num_tokens, head_dim]. Each key and value within a segment's reach is read
    once; a shared range once for all its members. Two products for each token and key seen.
    Of a segment without wanted rows nothing is read."""
    num_heads, _, head_dim = query.shape
    token_bytes = sum(x.shape[2] * x.shape[3] * x.element_size() for x in (layer.k, layer.v))
    num_pairs = 0
    num_read = 0
    for segment in wanted_parts(metadata):
        reach = min(options.sliding_window or segment.end, segment.end)
        num_read += min(segment.end, reach + segment.num_tokens - 1)
        # Tokens before `reach` see what is before them, the others as much as they reach.
        num_short = max(0, min(segment.end, reach) - segment.start)
        num_pairs += num_short * (2 * segment.start + num_short + 1) // 2
        num_pairs += (segment.num_tokens - num_short) * reach
    for shared in metadata.shared if options.sliding_window is None else ():
        num_read -= (shared.end - shared.start) * (len(shared.members) - 1)
    return Work(4.0 * num_heads * head_dim * num_pairs, float(num_read * token_bytes))


def wanted_parts(metadata: AttentionMetadata) -> Sequence[Segment]:
    """The step's segments, from the first to the last of their rows whose output is wanted."""
    if metadata.wanted_rows is None:
        return metadata.segments
    wanted = sorted(metadata.wanted_rows)
    parts = []
    for s in metadata.segments:
        own = wanted[bisect_left(wanted, s.row) : bisect_left(wanted, s.row + s.num_tokens)]
        if own:
            first, last = own[0] - s.row, own[-1] - s.row
            parts.append(Segment(s.slot, own[0], s.start + first, s.start + last + 1))
    return parts
