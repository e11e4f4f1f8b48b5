"""Work: the arithmetic and the bytes that a part of a step cannot do without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flexinfer.attention.base import AttentionMetadata, AttentionOptions, LayerKV


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
    once; a shared range once for all its members. Two products for each token and key seen."""
    num_heads, _, head_dim = query.shape
    token_bytes = sum(x.shape[2] * x.shape[3] * x.element_size() for x in (layer.k, layer.v))
    num_pairs = 0
    num_read = 0
    for segment in metadata.segments:
        reach = min(options.sliding_window or segment.end, segment.end)
        num_read += min(segment.end, reach + segment.num_tokens - 1)
        # Tokens before `reach` see what is before them, the others as much as they reach.
        num_short = max(0, min(segment.end, reach) - segment.start)
        num_pairs += num_short * (2 * segment.start + num_short + 1) // 2
        num_pairs += (segment.num_tokens - num_short) * reach
    for shared in metadata.shared if options.sliding_window is None else ():
        num_read -= (shared.end - shared.start) * (len(shared.members) - 1)
    return Work(4.0 * num_heads * head_dim * num_pairs, float(num_read * token_bytes))
