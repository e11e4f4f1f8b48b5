"""ModelRunner: one forward of the model over a step's flat batch, and the sampling after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from flexinfer import attention
from flexinfer.attention.base import AttentionMetadata, AttentionOptions, LayerKV, Segment
from flexinfer.attention.hook import use_attention
from flexinfer.models import LoadedModel
from flexinfer.request import Request
from flexinfer.sampler import RowLogprobs, Sampler
from flexinfer.scheduler import ScheduledRequest

if TYPE_CHECKING:
    from flexinfer.vtensor import VTensorManager


@dataclass(frozen=True, slots=True)
class SampledToken:
    request: Request
    token_id: int
    logprobs: RowLogprobs | None


class ModelRunner:
    """Not thread-safe: one step at a time."""

    def __init__(
        self, loaded: LoadedModel, manager: VTensorManager, attention_backend: str, seed: int
    ) -> None:
        self.loaded = loaded
        self.sampler = Sampler(seed, loaded.device)
        layers = [LayerKV(manager.k(i), manager.v(i)) for i in range(loaded.num_layers)]
        self.backend = attention.create(attention_backend, layers)

    def execute(self, items: Sequence[ScheduledRequest]) -> list[SampledToken]:
        """Compute the scheduled tokens, their KV included; sample where a sequence is complete.

        REQUIRES: the items' vTensors are extended to their ends.
        """
        items = sorted(items, key=lambda item: item.num_tokens > 1)
        segments = flat_segments(items)
        requests = [
            request
            for item in items
            if item.samples
            for request in (item.request, *item.request.siblings)
        ]
        logits = self._forward(items, segments)
        if not requests:
            return []
        sampled = self.sampler.sample(logits, requests)
        return [
            SampledToken(request, token_id, logprobs)
            for request, token_id, logprobs in zip(
                requests, sampled.token_ids, sampled.logprobs, strict=True
            )
        ]

    @torch.inference_mode()
    def _forward(
        self, items: Sequence[ScheduledRequest], segments: Sequence[Segment]
    ) -> torch.Tensor:
        """Logits [number of sampled tokens, vocab_size] of one flat batch."""
        device = self.loaded.device
        metadata = AttentionMetadata.build(segments, device)
        token_ids: list[int] = []
        positions: list[int] = []
        sampled_rows: list[int] = []
        for item in items:
            token_ids += item.request.token_ids[item.start : item.end]
            positions += range(item.start, item.end)
            if item.samples:
                sampled_rows += [len(token_ids) - 1] * (1 + len(item.request.siblings))

        def attend(
            module: torch.nn.Module,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            options: AttentionOptions,
            others: dict[str, Any],
        ) -> torch.Tensor:
            layer_idx: Any = module.layer_idx
            return self.backend.forward(layer_idx, query, key, value, options, metadata)

        with use_attention(self.loaded.model, attend):
            logits: torch.Tensor = self.loaded.model(
                input_ids=torch.tensor([token_ids], device=device),
                position_ids=torch.tensor([positions], device=device),
                use_cache=False,
                logits_to_keep=torch.tensor(sampled_rows, dtype=torch.int64, device=device),
            ).logits
        return logits[0]


def flat_segments(items: Sequence[ScheduledRequest]) -> list[Segment]:
    """Where each item's tokens stand in the flat batch."""
    segments = []
    row = 0
    for item in items:
        segments.append(Segment(item.vtensor.slot, row, item.start, item.end))
        row += item.num_tokens
    return segments
