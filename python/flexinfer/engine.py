"""LLMEngine: the step loop. Not thread-safe.

add_request ----> Scheduler.waiting
step:  schedule -> extend -> pre-extend (next step, in the background) -> model -> sample
       -> stop check -> record and release what has ended -> outputs
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from flexinfer.config import EngineConfig, dtype_name
from flexinfer.errors import RequestError
from flexinfer.inputs import InputProcessor, load_tokenizer
from flexinfer.output_builder import OutputBuilder
from flexinfer.outputs import RequestMetrics, RequestOutput
from flexinfer.request import Request
from flexinfer.sampling_params import SamplingParams
from flexinfer.scheduler import Batch, Scheduler
from flexinfer.types import Prompt

if TYPE_CHECKING:
    from flexinfer.models import LoadedModel
    from flexinfer.vtensor import VTensorManager

logger = logging.getLogger(__name__)

DEFAULT_MAX_MODEL_LEN = 4096
"""For architectures that set no limit themselves."""


class LLMEngine:
    """Owns model, manager, scheduler and runner."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises ValueError or UnsupportedModelError for settings or models that can not work."""
        from flexinfer import attention
        from flexinfer.models import load_model, max_positions, resolve_config
        from flexinfer.runner import ModelRunner

        self.config = config
        # What can be refused without the weights is refused before they are read.
        attention.check_name(config.attention_backend)
        wanted_len = choose_max_model_len(config, max_positions(resolve_config(config.model)))
        self.tokenizer: Any | None = None
        if not config.skip_tokenizer_init:
            self.tokenizer = load_tokenizer(config.tokenizer, config.model)
        self.loaded = load_model(config.model, config.dtype, config.device)
        self.manager = make_manager(config, self.loaded, wanted_len)
        try:
            max_model_len = fit_max_model_len(self.manager, wanted_len, config)
            self.scheduler = Scheduler(config.scheduler_config(max_model_len), self.manager)
            self.inputs = InputProcessor(self.tokenizer, self.loaded.vocab_size, max_model_len)
            self.runner = ModelRunner(
                self.loaded, self.manager, config.attention_backend, config.seed
            )
        except BaseException:
            self.manager.close()
            raise
        self._builders: dict[str, OutputBuilder] = {}

    @property
    def max_model_len(self) -> int:
        return self.scheduler.config.max_model_len

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        priority: int = 0,
    ) -> None:
        """Queue a request. Raises RequestError, before any work, if it can not be served."""
        params = SamplingParams() if params is None else params
        if request_id in self._builders:
            raise RequestError(f"request id {request_id!r} is in use")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestError(f"priority must be an integer, got {priority!r}")
        parsed = self.inputs.parse(prompt)
        self._check_params(params)
        max_tokens = self.max_model_len if params.max_tokens is None else params.max_tokens
        request = Request(
            request_id=request_id,
            prompt_token_ids=parsed.token_ids,
            params=params,
            max_num_tokens=min(self.max_model_len, len(parsed.token_ids) + max_tokens),
            metrics=RequestMetrics(arrival_time=time.monotonic()),
            eos_token_ids=self.loaded.eos_token_ids,
            priority=priority,
            cache_salt=parsed.cache_salt,
        )
        self._check_memory(request)
        self._builders[request_id] = OutputBuilder(request, parsed.text, self.tokenizer)
        self.scheduler.add(request)

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests()

    def get_num_unfinished_requests(self) -> int:
        return len(self._builders)

    def abort_request(self, request_ids: str | Iterable[str]) -> list[RequestOutput]:
        """End requests at any point and free what they hold; unknown ids are passed over."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        requests = [self._builders[i].request for i in ids if i in self._builders]
        self.scheduler.abort(requests, "abort")
        return self._outputs(requests)

    def step(self) -> list[RequestOutput]:
        """Advance all scheduled requests by one step; returns the outputs of those that changed.

        If the model fails, the requests of the step end with finish_reason "error", what they held
        is freed, and the exception goes on to the caller; the others stay queued.
        """
        batch = self.scheduler.schedule()
        requests = [item.request for item in batch.items]
        _note_scheduled(batch)
        try:
            changed = self._compute(batch) if requests else []
        except BaseException as error:
            self.scheduler.abort(requests, "error", f"{type(error).__name__}: {error}")
            self._outputs([*requests, *batch.failed])
            raise
        for request in changed:
            if request.is_finished:
                self.scheduler.finish(request)
        return self._outputs([*batch.failed, *changed])

    def close(self) -> None:
        """End all requests and free all memory. The engine can not be used afterwards."""
        self.abort_request(list(self._builders))
        self.manager.close()

    def _compute(self, batch: Batch) -> list[Request]:
        """Run the model on the batch; returns the requests that got a token."""
        self.scheduler.pre_extend(batch)
        sampled_tokens = self.runner.execute(batch.items)
        self.scheduler.advance(batch)
        now = time.monotonic()
        for sampled in sampled_tokens:
            request = sampled.request
            request.append(sampled.token_id)
            self._builders[request.request_id].update(sampled.token_id, sampled.logprobs)
            if request.metrics.first_token_time is None:
                request.metrics.first_token_time = now
        return [sampled.request for sampled in sampled_tokens]

    def _outputs(self, requests: Iterable[Request]) -> list[RequestOutput]:
        """Outputs of requests that changed; those that have ended are forgotten."""
        outputs = []
        for request in requests:
            builder = self._builders[request.request_id]
            if request.is_finished:
                request.metrics.finished_time = time.monotonic()
                del self._builders[request.request_id]
            output = builder.build()
            if output is not None:
                outputs.append(output)
        return outputs

    def _check_params(self, params: SamplingParams) -> None:
        if params.stop_strings and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this engine has none")
        for token_id in params.logit_bias or ():
            if token_id >= self.loaded.vocab_size:
                raise RequestError(
                    f"logit_bias names token {token_id}, but the vocabulary has "
                    f"{self.loaded.vocab_size}"
                )

    def _check_memory(self, request: Request) -> None:
        """A request that can never fit is refused now, with the numbers."""
        num_tokens = request.max_num_tokens - 1  # the last token needs no KV
        needed = self.manager.bytes_for(num_tokens)
        if needed > self.manager.memory_budget:
            raise RequestError(
                f"request {request.request_id!r} may need KV memory for {num_tokens} tokens "
                f"({needed} bytes); the budget is {self.manager.memory_budget} bytes"
            )


def choose_max_model_len(config: EngineConfig, limit: int | None) -> int:
    """What the user asked for, or what the model can (`limit`); never more than that."""
    if config.max_model_len is None:
        return DEFAULT_MAX_MODEL_LEN if limit is None else limit
    if limit is not None and config.max_model_len > limit:
        raise ValueError(
            f"max_model_len is {config.max_model_len}, but the model has {limit} positions"
        )
    return config.max_model_len


def make_manager(config: EngineConfig, loaded: LoadedModel, max_seq_len: int) -> VTensorManager:
    """The vTensor manager for the model's KV."""
    from flexinfer.vtensor import KVSpec, VTensorManager

    spec = KVSpec(
        num_layers=loaded.num_layers,
        num_kv_heads=loaded.num_kv_heads,
        head_dim=loaded.head_dim,
        dtype=dtype_name(loaded.dtype),
        max_seq_len=max_seq_len,
        layers_per_plane=config.layers_per_plane,
    )
    return VTensorManager(
        spec,
        device=str(loaded.device),
        max_requests=config.max_num_seqs,
        memory_budget=config.kv_cache_memory_bytes,
        chunk_bytes=config.chunk_bytes,
    )


def fit_max_model_len(manager: VTensorManager, wanted_len: int, config: EngineConfig) -> int:
    """The longest request that the budget holds, at most wanted_len.

    An explicit max_model_len that does not fit is refused: such a request would never end.
    """
    low, high = 0, wanted_len
    while low < high:
        middle = (low + high + 1) // 2
        if manager.bytes_for(middle) <= manager.memory_budget:
            low = middle
        else:
            high = middle - 1
    if low == wanted_len:
        return wanted_len
    if low < 2 or config.max_model_len is not None:
        raise ValueError(
            f"the KV budget of {manager.memory_budget} bytes holds one request of {low} tokens; "
            f"{wanted_len} tokens need {manager.bytes_for(wanted_len)} bytes: raise "
            "kv_cache_memory_bytes or lower max_model_len"
        )
    logger.warning(
        "max_model_len is %d, not the model's %d: the KV budget of %d bytes holds no more",
        low,
        wanted_len,
        manager.memory_budget,
    )
    return low


def _note_scheduled(batch: Batch) -> None:
    now = time.monotonic()
    for item in batch.items:
        if item.request.metrics.first_scheduled_time is None:
            item.request.metrics.first_scheduled_time = now
