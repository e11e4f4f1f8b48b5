"""ModelRunner: the executor of this process: one forward of the model over a step's flat batch, and
the sampling after it.

StepPlan -> InputBuilder -> StepInputs -> forward -> logits -> Sampler -> StepResult
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from flexinfer import attention
from flexinfer.attention.base import LayerKV
from flexinfer.attention.hook import use_attention
from flexinfer.attention.kv_format import KVFormat
from flexinfer.layers.adapters import use_adapters
from flexinfer.layers.decoder_stack import find_decoder_stack
from flexinfer.models.describe import AttentionLayer, LoadedModel
from flexinfer.models.probe import no_mask
from flexinfer.runner.cuda_graphs import DecodeGraphs, Recorder
from flexinfer.runner.inputs import InputBuilder, StepInputs, padded_count
from flexinfer.runner.known_positions import KnownPositions
from flexinfer.runner.plan import SampledToken, ScoredRows, SequenceFailure, StepPlan, StepResult
from flexinfer.runner.states import StepStates
from flexinfer.runtime.cache_argument import cache_argument
from flexinfer.runtime.transfer import to_device
from flexinfer.sampling.grammars import GrammarCompiler
from flexinfer.sampling.logprobs import score_tokens
from flexinfer.sampling.sampler import Drawn, Sampler, describe
from flexinfer.sampling.sequences import SequenceState

if TYPE_CHECKING:
    from flexinfer.vtensor import VTensor, VTensorManager

logger = logging.getLogger(__name__)


WARM_UP_S = 1.0
WARM_UP_ROWS = (*range(1, 65), 128, 256, 512, 1024, 2048)
WARM_UP_LOGITS = 64
COMPILED_SHAPES = ((8, 4), (8, 1), (8, 0), (1, 1), (1, 0))
"""Rows, and rows with logits: to torch.compile 1 and 0 are special, and all others alike."""


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """The tokens of a step, maybe still on their way from the device."""

    sampler: Sampler
    sampling_ids: tuple[int, ...]
    drawn: Drawn | None
    """None: no row is sampled."""
    failures: dict[int, str]
    """Sampling id -> why it has failed already."""
    proposed: dict[int, int]
    """Row -> the token behind which the next row stands, which is of the same sequence."""

    def result(self) -> StepResult:
        """See `PendingResult.result`."""
        failures = dict(self.failures)
        tokens: list[SampledToken] = []
        if self.drawn is not None:
            sampled = self.sampler.finish(self.drawn)
            rows = zip(self.sampling_ids, self.drawn.states, strict=True)
            rejecting = None  # the sequence that gets no further token of this step
            for row, (sampling_id, state) in enumerate(rows):
                if sampling_id in failures or sampling_id == rejecting:
                    continue
                if row in sampled.errors:
                    rejecting = sampling_id
                    if row - 1 not in self.proposed:  # else it may never be asked for this token
                        failures[sampling_id] = sampled.errors[row]
                    continue
                token_id, scores = sampled.token_ids[row], state.take_scores()
                tokens.append(SampledToken(sampling_id, token_id, sampled.logprobs[row], scores))
                if row not in self.proposed:
                    continue
                if token_id == self.proposed[row]:
                    self.sampler.sequences[sampling_id].accept(token_id)
                else:
                    rejecting = sampling_id
        return StepResult(tokens, [SequenceFailure(*failure) for failure in failures.items()])


def arena_of(
    manager: VTensorManager, layer: AttentionLayer, layer_idx: int, kv_format: KVFormat | None
) -> LayerKV:
    """Where K and V of a layer stand."""
    k = manager.k(layer.owner)
    v = k[..., : layer.value_dim] if layer.is_latent else manager.v(layer.owner)
    return LayerKV(
        k,
        v,
        stores=layer.owner == layer_idx,
        chunk=layer.chunk,
        window=layer.window,
        format=kv_format,
    )


class ModelRunner:
    """Not thread-safe: one step at a time."""

    def __init__(
        self,
        loaded: LoadedModel,
        manager: VTensorManager,
        attention_backend: str,
        seed: int,
        grammars: GrammarCompiler,
        *,
        compile_model: bool = False,
        kv_cache_dtype: str = "auto",
        pads_rows: bool | None = None,
    ) -> None:
        """compile_model: run the model as one graph of torch.compile, whatever the batch.
        kv_cache_dtype: "auto" is the model's; else how KV is quantised, a name of `KVFormat`.
        pads_rows: whether batches are padded; None: where layers compile each number of rows."""
        self.loaded = loaded
        self.model: Any = loaded.model
        self._is_compiled = compile_model
        if compile_model:
            self.model = _compiled(loaded.model)
        self._stack = None if compile_model else find_decoder_stack(loaded.model)
        self.sampler = Sampler(seed, loaded.device, grammars)
        kv_format = None if kv_cache_dtype == "auto" else KVFormat(kv_cache_dtype, loaded.dtype)
        layers = [arena_of(manager, of, i, kv_format) for i, of in enumerate(loaded.layers)]
        self.backend = attention.create(attention_backend, layers)
        if pads_rows is None:
            pads_rows = self.backend.takes_padding and any(
                getattr(module, "compiles_row_counts", False) for module in loaded.model.modules()
            )
        self.inputs = InputBuilder(loaded.device, self.backend.sharing_cost, pads_rows=pads_rows)
        self.states = StepStates(loaded, manager)
        self._max_seq_len = manager.spec.max_seq_len
        self.graphs: DecodeGraphs | None = None
        self._drawn: Drawn | None = None  # by the last step

    @property
    def uses_shared_ranges(self) -> bool:
        return self.backend.sharing_cost is not None

    def execute(self, plan: StepPlan) -> StepResult:
        """See `Executor.execute`."""
        result = self.sample(self.compute(plan), plan)
        self.states.write()
        return result

    def submit(self, plan: StepPlan) -> PendingTokens:
        """See `Executor.submit`."""
        return self.begin_sampling(self.compute(plan), plan)

    def forget(self, sampling_ids: Sequence[int]) -> None:
        self.sampler.sequences.forget(sampling_ids)

    def sync(self) -> None:
        """See `Executor.sync`."""

    def compute(self, plan: StepPlan) -> torch.Tensor:
        """KV of the planned tokens, and the logits [rows that need them, vocab_size]."""
        self.sampler.sequences.add(plan.new_sequences)
        inputs = self.inputs.build(plan)
        if plan.fed:
            self._feed(inputs, plan.fed)
        self.states.read(inputs.metadata.segments, plan.states)
        return self.forward(inputs)

    @torch.inference_mode()
    def _feed(self, inputs: StepInputs, fed: Sequence[tuple[int, int]]) -> None:
        """Put tokens of the last step where this one computes them, without waiting for them."""
        assert self._drawn is not None
        rows, sources = (
            to_device(ids, torch.int64, self.loaded.device) for ids in zip(*fed, strict=True)
        )
        tokens = self._drawn.on_device.clamp(min=0)  # a row that failed computes in vain
        inputs.token_ids.index_copy_(0, rows, tokens[sources])

    @torch.inference_mode()
    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """Logits [number of logits_rows, vocab_size] of one flat batch."""
        if inputs.adapters is not None:  # graphs know none
            with use_adapters(inputs.adapters):
                return self._forward(inputs)
        if self.graphs is not None and self.graphs.accepts(inputs):
            return self.graphs.run(inputs)
        return self._forward(inputs)

    def warm_up(self, max_rows: int) -> None:
        """Have kernels compiled for the usual numbers of rows, few ones first, for about a second.

        The thread that will execute plans calls it: each has kernels of its own.
        """
        if not self.inputs.pads_rows:
            return
        deadline_s = time.monotonic() + WARM_UP_S
        for count in dict.fromkeys(map(padded_count, WARM_UP_ROWS)):
            if count > max_rows or time.monotonic() > deadline_s:
                return
            self.forward(self.inputs.build_padding(count, min(count, WARM_UP_LOGITS)))

    def compile_ahead(self) -> None:
        """Have every graph made that steps will need, where the model is compiled; in the first
        steps if attention takes no padding."""
        if not (self._is_compiled and self.backend.takes_padding):
            return
        for num_rows, num_logits in COMPILED_SHAPES:
            self.forward(self.inputs.build_padding(num_rows, num_logits))

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        counts_calls = self.loaded.counts_calls
        attending = use_attention(
            self.loaded.model, self.backend, inputs.metadata, counts_calls=counts_calls
        )
        with attending, self.states.in_force():
            if self._stack is not None and not self._stack.is_watched:
                rows = inputs.logits_rows
                narrows = inputs.adapters is None  # they are told by rows of the whole batch
                return self._stack.logits(inputs.token_ids, inputs.positions, rows, narrows=narrows)
            others: dict[str, Any] = no_mask(self.loaded.is_indexed, self.loaded.device)
            if self.loaded.asks_cache_for_positions:
                argument = cache_argument(type(self.loaded.model).forward) or "cache"
                others[argument] = KnownPositions(inputs.positions)
            logits: torch.Tensor = self.model(
                input_ids=inputs.token_ids[None],
                position_ids=inputs.positions[None],
                use_cache=False,
                logits_to_keep=inputs.logits_rows,
                **others,
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
        graphs = DecodeGraphs(
            self._forward,
            recorder,
            sizes,
            self._max_seq_len,
            self.loaded.device,
            self.backend.graph_sharing_cost,
        )
        start_s = time.perf_counter()
        if graphs.capture(vtensor.slot):
            self.graphs = graphs
            seconds = time.perf_counter() - start_s
            logger.info("%d CUDA graphs captured in %.1f s", len(graphs), seconds)

    def sample(self, logits: torch.Tensor, plan: StepPlan) -> StepResult:
        """One token for each planned row; the rows after them score prompts."""
        return self.begin_sampling(logits, plan).result()

    def begin_sampling(self, logits: torch.Tensor, plan: StepPlan) -> PendingTokens:
        num_sampled = len(plan.sampled_rows)
        failures = self._score(logits[num_sampled:], plan.scored)
        self._drawn = None
        if num_sampled:
            self._drawn = self.sampler.begin(logits[:num_sampled], self._states(plan))
        return PendingTokens(
            self.sampler, plan.sampling_ids, self._drawn, failures, proposed_tokens(plan)
        )

    def _states(self, plan: StepPlan) -> list[SequenceState]:
        """Of the sequences that sample, up to the tokens of this plan."""
        token_ids = np.frombuffer(plan.token_ids, np.int32)
        columns = (plan.sampling_ids, plan.sampled_rows, plan.sampled_lengths)
        states: list[SequenceState] = []
        drafted: list[int] = []
        last_id = None
        for sampling_id, row, length in zip(*columns, strict=True):
            state, token_id = self.sampler.sequences[sampling_id], int(token_ids[row])
            if sampling_id == last_id:
                drafted.append(token_id)
                states.append(state.ahead(drafted))
                continue
            state.read(length, token_id)
            states.append(state)
            last_id, drafted = sampling_id, []
        return states

    def _score(self, logits: torch.Tensor, scored: Sequence[ScoredRows]) -> dict[int, str]:
        """Log probabilities of prompt tokens; logits: [number of scored rows, vocab_size].

        Returns the sampling ids of those that failed, and why.
        """
        failures = {}
        row = 0
        for part in scored:
            num_rows = part.end - part.start
            state = self.sampler.sequences[part.sampling_id]
            try:
                token_ids = state.setup.prompt_token_ids[part.start + 1 : part.end + 1]
                num_top = state.params.prompt_logprobs or 0
                scores = score_tokens(logits[row : row + num_rows], token_ids, num_top)
                state.add_scores(part.start, scores)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                failures[part.sampling_id] = describe(error)
            row += num_rows
        return failures


def proposed_tokens(plan: StepPlan) -> dict[int, int]:
    """Sampled row -> the token behind which the next one stands, if that is of the same sequence
    (`StepPlan.sampling_ids`)."""
    ids, rows = plan.sampling_ids, plan.sampled_rows
    if len(set(ids)) == len(ids):
        return {}
    token_ids = np.frombuffer(plan.token_ids, np.int32)
    return {i: int(token_ids[rows[i + 1]]) for i in range(len(ids) - 1) if ids[i] == ids[i + 1]}


def _compiled(model: torch.nn.Module) -> Callable[..., Any]:
    """The model as graphs of torch.compile. It keeps eight for a function, whosever they are, and
    models of a class have one: steps failed in the fifth engine of a process, or the ninth."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    call.__code__ = call.__code__.replace()  # a function of this engine's own
    compiled: Callable[..., Any] = torch.compile(call, fullgraph=True, dynamic=True)
    return compiled
