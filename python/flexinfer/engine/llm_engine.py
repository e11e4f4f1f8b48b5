"""LLMEngine: the step loop. Not thread-safe.

add_request ----> Scheduler.waiting
step:  schedule -> extend -> pre-extend (next step, in the background) -> model -> sample
       -> stop check -> record and release what has ended -> outputs
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, KeysView

from flexinfer.config import EngineConfig
from flexinfer.engine.build import EngineParts, build_parts, make_speculation
from flexinfer.engine.engine_stats import take_stats
from flexinfer.engine.group import NewToken, RequestGroup
from flexinfer.engine.handover import EngineHandover
from flexinfer.engine.plan_builder import PlanBuilder
from flexinfer.engine.request_factory import RequestFactory
from flexinfer.engine.step_execution import StepExecution
from flexinfer.engine.step_pipeline import StepPipeline
from flexinfer.engine.stream_pace import StreamPace
from flexinfer.errors import RequestError
from flexinfer.lora.adapters import Choice, salt_of
from flexinfer.lora.request import LoRARequest
from flexinfer.memory.elastic import BudgetChange
from flexinfer.metrics.requests import RequestStats
from flexinfer.metrics.steps import EngineStats, StepMeter, StepStats, StepTotals
from flexinfer.outputs import RequestOutput
from flexinfer.runtime.malloc import return_freed_memory
from flexinfer.runtime.panics import panics_as_errors
from flexinfer.runtime.torch_modes import plain_modes
from flexinfer.sampling.params import BeamSearchParams, SamplingParams
from flexinfer.scheduler.request import Request
from flexinfer.scheduler.scheduler import Batch
from flexinfer.types import Prompt

logger = logging.getLogger(__name__)


class LLMEngine:
    """Owns model, manager, scheduler and runner."""

    def __init__(self, parts: EngineParts) -> None:
        self.config = parts.config
        self.tokenizer = parts.tokenizer
        self.loaded = parts.loaded
        self.kv_memory = parts.kv_memory
        self.manager = parts.manager
        self.scheduler = parts.scheduler
        self.runner = parts.runner
        self._executor = parts.executor
        self.ranks = parts.ranks
        self.inputs = parts.inputs
        self.grammars = parts.grammars
        self.sampling_defaults = parts.sampling_defaults
        self._elastic = parts.elastic
        self._plans = PlanBuilder(self._executor, self.manager.shared_ranges)
        self._steps = StepPipeline(StepExecution(parts, self._plans), parts.config)
        self.draft_model = parts.draft_model
        self._events = parts.events
        self.adapters = parts.adapters
        self.handover = EngineHandover(parts)
        self._speculation = make_speculation(parts)
        self._settled: list[RequestOutput] = []  # outputs of a step that had to be waited for
        self._meter = StepMeter(self.manager)
        self._requests = RequestStats()
        self._pace = StreamPace(self.config.stream_interval)
        self._factory = RequestFactory(parts, self._pace)
        self._groups: dict[str, RequestGroup] = {}
        self._group_of: dict[str, RequestGroup] = {}  # by the id of each of its sequences

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> LLMEngine:
        """Loads the model. Raises ValueError or UnsupportedModelError for settings or models that
        cannot work."""
        return cls(build_parts(engine_args))

    @property
    def max_model_len(self) -> int:
        return self.scheduler.config.max_model_len

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | None = None,
        priority: int = 0,
        lora_request: Choice = None,
    ) -> None:
        """Queue a request. Raises RequestError, before any work, if it cannot be served."""
        params = params or self.sampling_defaults.params()
        chosen = self.adapters.chosen(lora_request)
        group = self._factory.make(request_id, prompt, params, priority, chosen)
        self._remember(group)
        self.adapters.begin(chosen)
        if not group.is_finished:
            self.scheduler.add(group.leader)
        num_samples = params.beam_width if isinstance(params, BeamSearchParams) else params.n
        most = self.max_model_len - len(group.leader.prompt_token_ids)
        self._requests.note_added(num_samples, params.max_tokens or most)
        if group.is_finished:  # with the tokens that it was given
            self._settled += self._outputs([group])

    def has_unfinished_requests(self) -> bool:
        return bool(self._settled) or self.scheduler.has_unfinished_requests()

    def get_num_unfinished_requests(self) -> int:
        return len(self._groups)

    def unfinished_ids(self) -> KeysView[str]:
        return self._groups.keys()

    def abort_request(self, request_ids: str | Iterable[str]) -> list[RequestOutput]:
        """End requests at any point and free what they hold; unknown ids are passed over."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        groups = [self._groups[i] for i in ids if i in self._groups]
        self.scheduler.abort([r for group in groups for r in group.unfinished()], "abort")
        outputs = self._outputs(groups)
        if not self._groups:
            self._settle()  # what a step in flight computes in vain is freed, too
        return outputs

    def step(self) -> list[RequestOutput]:
        """Advance all scheduled requests by one step; returns the outputs of those that changed.

        A request with which the model fails ends with finish_reason "error". If it fails with each
        of the step, all of these end so, what they held is freed, and the exception goes on to the
        caller; the others stay queued. While the engine sleeps it raises ValueError, with nothing
        changed.
        """
        settled, self._settled = self._settled, []
        return settled + self._step(may_run_ahead=True)

    @plain_modes()
    def _step(self, *, may_run_ahead: bool) -> list[RequestOutput]:
        self._meter.start()
        batch = self._steps.launched or self.scheduler.schedule()
        if self._speculation is not None:
            self._speculation.draft(batch)
        requests = [item.request for item in batch.items]
        num_prefill_tokens = sum(i.num_tokens for i in batch.items if i.request.is_prefilling)
        _note_scheduled(batch)
        try:
            changed = self._compute(batch, may_run_ahead=may_run_ahead) if requests else []
        except BaseException as error:
            message = f"{type(error).__name__}: {error}"
            running = [r for r in requests if not r.is_finished]
            groups = self._groups_of([*running, *batch.failed])
            for group in groups:
                self.scheduler.abort(group.unfinished(), "error", message)
            self._outputs(groups)
            raise
        for request in batch.failed:
            self._group_of[request.request_id].end_with(request, self.scheduler)
        outputs = self._outputs([*self._groups_of(batch.failed), *changed])
        if batch.items:
            step = self._meter.stop(
                num_requests=len(batch.items),
                num_tokens=batch.num_tokens,
                num_prefill_tokens=num_prefill_tokens,
                num_preempted=len(batch.preempted),
            )
            self.scheduler.observe(step)
            if self._speculation is not None:
                self._speculation.observe(step.step_us)
        return outputs

    def warm_up(self) -> None:
        """Compile ahead what first steps would wait for; the thread that calls `step` calls it."""
        if self.ranks is not None:
            return  # each rank would compile in its own time
        try:
            self.runner.warm_up(self.scheduler.config.max_num_batched_tokens)
        except Exception:
            logger.warning("the model could not be warmed up", exc_info=True)

    def close(self) -> None:
        """End all requests and free all memory. The engine cannot be used afterwards."""
        self.abort_request(list(self._groups))
        self.grammars.close()
        if self.draft_model is not None:
            self.draft_model.close()
        self.adapters.close()
        if self._events is not None:
            self._events.close()
        self.manager.close()
        if self.ranks is not None:
            self.ranks.close()

    def check_ranks(self) -> None:
        """Raises RankError if another process of this engine has failed."""
        if self.ranks is not None:
            self.ranks.check()

    def on_rank_failure(self, wake: Callable[[], None]) -> None:
        """Have `wake` called, in another thread, as soon as one has failed."""
        if self.ranks is not None:
            self.ranks.when_failed(wake)

    # Memory while serving. All of it between steps.

    def set_kv_cache_memory(self, size: int | str) -> BudgetChange:
        """Change the budget of physical KV memory; see `ElasticMemory.set_budget`. Size and answer
        are of the draft model's part too."""
        self._settle()
        if self.draft_model is None:
            change = self._elastic.set_budget(size)
        else:
            own, drafts = self.draft_model.split(size)
            change = self._elastic.set_budget(own) + self.draft_model.set_budget(drafts)
        self._executor.sync()
        return change

    def sleep(self, level: int = 1) -> int:
        """Give all physical KV memory back to the system, and what malloc keeps free for the next
        steps; returns bytes of KV.

        Unfinished requests keep their state and go on after `wake_up`; recorded prefixes are saved
        with level 1, forgotten with level 2. The model's weights stay where they are.
        """
        self._settle()
        num_bytes = self._elastic.sleep(level)
        if self.draft_model is not None:
            num_bytes += self.draft_model.release_all()
        self._executor.sync()
        return_freed_memory()
        return num_bytes

    def wake_up(self, tags: Iterable[str] | None = None) -> bool:
        """Undo `sleep`, as `ElasticMemory.wake_up`; returns whether the engine is awake."""
        self._elastic.wake_up(tags)
        self._executor.sync()
        return not self.is_sleeping()

    def is_sleeping(self) -> bool:
        return self.manager.asleep

    def reset_prefix_cache(self) -> int:
        """Forget all recorded prefixes that are not pinned; returns how many tokens they held."""
        if self.draft_model is not None:
            self.draft_model.manager.reset_prefix_cache()
        return self.manager.reset_prefix_cache()

    def pin_prefix(self, prompt: Prompt, owner: str, ttl_s: float | None = None) -> int:
        """Keep the longest recorded prefix of `prompt` from eviction, for `ttl_s` seconds or until
        `unpin_prefix(owner)`; returns how many tokens are pinned."""
        parsed = self.inputs.parse(prompt)
        snapshots = self.scheduler.states.snapshots
        return snapshots.pin_prefix(parsed.token_ids, owner, ttl_s, parsed.cache_salt)

    def unpin_prefix(self, owner: str) -> int:
        """Drop the pins of `owner`; returns how many there were."""
        return self.manager.unpin_prefix(owner)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter, as `Adapters.add` does; it stays until `remove_lora`."""
        self.adapters.add(lora_request)
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Let no further request choose it; see `Adapters.remove`."""
        return self.adapters.remove(lora_id)

    def list_loras(self) -> set[int]:
        """`lora_int_id` of those that are loaded."""
        return self.adapters.ids

    def kv_salt(self, cache_salt: str, lora_request: LoRARequest | None) -> str:
        """Under which prefixes of such requests are recorded."""
        return salt_of(cache_salt, self.adapters.chosen(lora_request))

    @property
    def step_totals(self) -> StepTotals:
        """Sums over all steps so far; changes with the next step."""
        return self._meter.totals

    @property
    def last_step(self) -> StepStats | None:
        """Times of the last step that computed something."""
        return self._meter.last

    def stats(self) -> EngineStats:
        """All numbers at this moment. Walks all chunks: not for every step."""
        speculation = None if self._speculation is None else self._speculation.stats.copy()
        drafts = None if self.draft_model is None else self.draft_model.manager.stats()
        return take_stats(self.scheduler, self._meter, self._requests.copy(), speculation, drafts)

    def _settle(self) -> None:
        """Wait for the step in flight, if there is one; the next `step()` gives its outputs."""
        if self._steps.launched is not None:
            self._settled += self._step(may_run_ahead=False)

    def _compute(self, batch: Batch, *, may_run_ahead: bool) -> list[RequestGroup]:
        """Run the model on the batch; returns the groups that got tokens, or failed."""
        result, failures = self._steps.execute(batch, may_run_ahead=may_run_ahead)
        failures += self._plans.match_failures(result)
        new_tokens = self._plans.match(result)
        if self._speculation is not None:
            token_ids = ((r, token.token_id) for r, token in new_tokens)
            failures = self._speculation.settle(batch, token_ids, failures)
        failures = [failure for failure in failures if not failure[0].is_finished]
        for request, message in failures:
            request.finish("error", message)  # so that it is neither recorded nor forked
        self.scheduler.advance(batch)
        now = time.monotonic()
        tokens_of: dict[RequestGroup, list[NewToken]] = {}
        for new_token in new_tokens:
            if not new_token[0].is_finished:  # it may have ended while this step was in flight
                group = self._group_of[new_token[0].request_id]
                tokens_of.setdefault(group, []).append(new_token)
        self._pace.end_step(sum(group.is_streamed for group in tokens_of), now)
        for group, tokens in tokens_of.items():
            num_taken = self._update(group, tokens)
            leader = group.leader
            num_prompt_tokens = len(leader.prompt_token_ids)
            num_cached = leader.num_cached_tokens or 0
            num_each = max(1, num_taken // len({request for request, _ in tokens}))
            self._requests.note_tokens(
                leader.metrics, num_prompt_tokens, num_taken, now, num_cached, num_each
            )
        for request, message in failures:
            self.scheduler.abort([request], "error", message)
            self._group_of[request.request_id].end_with(request, self.scheduler)
        return [*tokens_of, *self._groups_of(request for request, _ in failures)]

    def _update(self, group: RequestGroup, tokens: list[NewToken]) -> int:
        """How many of the tokens were wanted. A failure, as of a tokenizer, ends this group and no
        other."""
        try:
            with panics_as_errors:
                return group.update(tokens, self.scheduler)
        except Exception as error:
            self._fail(group, error)
            return len(tokens)

    def _fail(self, group: RequestGroup, error: Exception) -> str:
        """End all of a group that runs; returns the message."""
        logger.warning("request %r has failed", group.request_id, exc_info=True)
        message = f"{type(error).__name__}: {error}"
        held = [r for r in group.sequences if not r.is_finished or r.vtensor is not None]
        self.scheduler.abort(held, "error", message)
        return message

    def _outputs(self, groups: Iterable[RequestGroup]) -> list[RequestOutput]:
        """Outputs of groups that changed; those that have ended are forgotten."""
        outputs = []
        for group in dict.fromkeys(groups):
            output = self._build(group)
            if group.is_finished:
                group.leader.metrics.finished_time = time.monotonic()
                self._forget(group)
            if output is not None:
                outputs.append(output)
                if output.finished:
                    longest = max((one.num_output_tokens for one in group.sequences), default=0)
                    self._requests.note_end(output, time.monotonic(), longest)
        ended = self.scheduler.take_ended()
        self._plans.forget(ended)
        if not self.scheduler.has_unfinished_requests():
            self.scheduler.pre_extender.rest()
        if self._speculation is not None:
            self._speculation.forget(ended)
        return outputs

    def _build(self, group: RequestGroup) -> RequestOutput | None:
        """The group's output; if that fails the group ends, and no other."""
        try:
            with panics_as_errors:
                return group.build()
        except Exception as error:
            return group.failure(self._fail(group, error))

    def _groups_of(self, requests: Iterable[Request]) -> list[RequestGroup]:
        return list(dict.fromkeys(self._group_of[request.request_id] for request in requests))

    def _remember(self, group: RequestGroup) -> None:
        for sequence_id in group.sequence_ids:
            if sequence_id in self.scheduler.running:
                self._settle()  # it has ended, and a step of it is in flight
            if sequence_id in self._group_of:
                raise RequestError(f"request id {sequence_id!r} is in use")
        self._groups[group.request_id] = group
        self._group_of.update(dict.fromkeys(group.sequence_ids, group))

    def _forget(self, group: RequestGroup) -> None:
        """Nothing of a group outlives it: beams that a finished search still runs are freed."""
        self.scheduler.abort(group.unfinished(), "abort")
        self.adapters.end(group.leader.adapter)
        del self._groups[group.request_id]
        for sequence_id in group.sequence_ids:
            del self._group_of[sequence_id]


def _note_scheduled(batch: Batch) -> None:
    now = time.monotonic()
    for item in batch.items:
        if item.request.metrics.first_scheduled_time is None:
            item.request.metrics.first_scheduled_time = now
