"""ModelRunner: one forward of the model over a step's flat batch, and the sampling after it.

scheduled requests -> InputBuilder -> StepInputs -> forward -> logits -> Sampler -> tokens
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from flexinfer import attention
from flexinfer.attention.base import LayerKV
from flexinfer.attention.hook import use_attention
from flexinfer.models.loading import LoadedModel
from flexinfer.runner.cuda_graphs import DecodeGraphs, Recorder
from flexinfer.runner.inputs import InputBuilder, ScoredRows, StepInputs
from flexinfer.sampling.sampler import RowLogprobs, Sampler, score_tokens
from flexinfer.scheduler.batch import ScheduledRequest
from flexinfer.scheduler.request import Request

if TYPE_CHECKING:
    from flexinfer.vtensor import VTensor, VTensorManager

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SampledToken:
    request: Request
    token_id: int
    logprobs: RowLogprobs | None


class ModelRunner:
    """Not thread-safe: one step at a time."""

    def __init__(
        self,
        loaded: LoadedModel,
        manager: VTensorManager,
        attention_backend: str,
        seed: int,
        *,
        compile_model: bool = False,
    ) -> None:
        """compile_model: run the model as one graph of torch.compile, whatever the batch."""
        self.loaded = loaded
        self.model: Any = loaded.model
        if compile_model:
            self.model = torch.compile(loaded.model, fullgraph=True, dynamic=True)
        self.sampler = Sampler(seed, loaded.device)
        layers = [LayerKV(manager.k(i), manager.v(i)) for i in range(loaded.num_layers)]
        self.backend = attention.create(attention_backend, layers)
        cost = self.backend.sharing_cost
        self.inputs = InputBuilder(loaded.device, manager.shared_ranges, cost)
        self.graphs: DecodeGraphs | None = None

    def execute(self, items: Sequence[ScheduledRequest]) -> list[SampledToken]:
        """Compute the scheduled tokens, their KV included; sample where a sequence is complete.

        REQUIRES: the items' vTensors are extended to their ends.
        """
        inputs = self.inputs.build(items)
        logits = self.forward(inputs)
        return self.sample(logits, inputs)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """Logits [number of sampled_rows, vocab_size] of one flat batch."""
        if self.graphs is not None and not inputs.scored and self.graphs.accepts(inputs):
            return self.graphs.run(inputs)
        return self._forward(inputs)

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        with use_attention(self.loaded.model, self.backend, inputs.metadata):
            logits: torch.Tensor = self.model(
                input_ids=inputs.token_ids[None],
                position_ids=inputs.positions[None],
                use_cache=False,
                logits_to_keep=inputs.sampled_rows,
            ).logits
        return logits[0]

    @torch.inference_mode()
    def capture_graphs(self, vtensor: VTensor, recorder: Recorder, sizes: Sequence[int]) -> None:
        """Have steps of decodes replayed from graphs, where model and attention allow it.

        vtensor: empty, and overwritten; the caller releases it.
        """
        vtensor.extend(2)
        self._forward(self.inputs.build_prompt(vtensor.slot, 2))  # each layer shows what it needs
        if not self.backend.supports_graphs:
            logger.info("no CUDA graphs: attention goes request by request")
            return
        max_seq_len = self.backend.layers[0].k.shape[1]
        cost = self.backend.graph_sharing_cost
        graphs = DecodeGraphs(self._forward, recorder, sizes, max_seq_len, self.loaded.device, cost)
        start_s = time.perf_counter()
        if graphs.capture(vtensor.slot):
            self.graphs = graphs
            seconds = time.perf_counter() - start_s
            logger.info("%d CUDA graphs captured in %.1f s", len(graphs), seconds)

    def sample(self, logits: torch.Tensor, inputs: StepInputs) -> list[SampledToken]:
        """One token for each row of the logits that a request samples from; the others score."""
        requests = inputs.requests
        self._score(logits[len(requests) :], inputs.scored)
        if not requests:
            return []
        sampled = self.sampler.sample(logits[: len(requests)], requests)
        return [
            SampledToken(request, token_id, logprobs)
            for request, token_id, logprobs in zip(
                requests, sampled.token_ids, sampled.logprobs, strict=True
            )
        ]

    def _score(self, logits: torch.Tensor, scored: Sequence[ScoredRows]) -> None:
        """Log probabilities of prompt tokens; logits: [number of scored rows, vocab_size]."""
        row = 0
        for part in scored:
            num_rows = part.end - part.start
            request = part.request
            token_ids = request.prompt_token_ids[part.start + 1 : part.end + 1]
            num_top = request.params.prompt_logprobs or 0
            request.scored += score_tokens(logits[row : row + num_rows], token_ids, num_top)
            row += num_rows
