"""ModelRunner: one forward of the model over a step's flat batch, and the sampling after it.

scheduled requests -> InputBuilder -> StepInputs -> forward -> logits -> Sampler -> tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from flexinfer import attention
from flexinfer.attention.base import LayerKV
from flexinfer.attention.hook import use_attention
from flexinfer.batch import ScheduledRequest
from flexinfer.models import LoadedModel
from flexinfer.request import Request
from flexinfer.sampler import RowLogprobs, Sampler
from flexinfer.step_inputs import InputBuilder, StepInputs

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
        self.inputs = InputBuilder(loaded.device)
        layers = [LayerKV(manager.k(i), manager.v(i)) for i in range(loaded.num_layers)]
        self.backend = attention.create(attention_backend, layers)

    def execute(self, items: Sequence[ScheduledRequest]) -> list[SampledToken]:
        """Compute the scheduled tokens, their KV included; sample where a sequence is complete.

        REQUIRES: the items' vTensors are extended to their ends.
        """
        inputs = self.inputs.build(items)
        logits = self.forward(inputs)
        return self.sample(logits, inputs)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """Logits [number of requests that sample, vocab_size] of one flat batch."""
        with use_attention(self.loaded.model, self.backend, inputs.metadata):
            logits: torch.Tensor = self.loaded.model(
                input_ids=inputs.token_ids[None],
                position_ids=inputs.positions[None],
                use_cache=False,
                logits_to_keep=inputs.sampled_rows,
            ).logits
        return logits[0]

    def sample(self, logits: torch.Tensor, inputs: StepInputs) -> list[SampledToken]:
        """One token for each row of the logits."""
        requests = inputs.requests
        if not requests:
            return []
        sampled = self.sampler.sample(logits, requests)
        return [
            SampledToken(request, token_id, logprobs)
            for request, token_id, logprobs in zip(
                requests, sampled.token_ids, sampled.logprobs, strict=True
            )
        ]
