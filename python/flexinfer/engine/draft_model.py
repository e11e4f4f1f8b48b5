"""DraftModel: a small model that proposes what the large one is to verify. On a CPU only.

    request of the engine     | p0 p1 ... pn |            vTensor of the engine's manager
    the same in here          | p0 p1 ... pn d1 d2 |      vTensor of a manager of its own

Each request that is drafted has a second vTensor, in a second manager, whose budget is a part of
the engine's. It follows the request: what the small model has not seen yet is computed when a
proposal is asked for, what was rejected is truncated, and what a request leaves is recorded, so
that the next turn, or a fork, of a conversation shares it as it shares the large model's. Where its
memory is short, requests go without proposals. Not thread-safe.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flexinfer.memory.elastic import BudgetChange
from flexinfer.runner.plan import StepPlan
from flexinfer.runtime.units import parse_bytes
from flexinfer.scheduler.request import Request
from flexinfer.speculation.drafter import Outlook

if TYPE_CHECKING:
    from flexinfer.runner.model_runner import ModelRunner
    from flexinfer.vtensor import VTensor, VTensorManager


MAX_LAST_TOKENS = 8
"""So many tokens before the last are computed together with it, more in a pass of their own."""


@dataclass(slots=True)
class _Held:
    """A request's KV under the small model."""

    vtensor: VTensor
    num_computed: int
    num_known: int = 0
    """Tokens that the request had when it was drafted last."""
    drafted: list[int] = field(default_factory=list)
    """What was proposed then; KV is there of all but the last."""


@dataclass(frozen=True, slots=True)
class _Row:
    """Tokens [start, end) of a request to compute."""

    held: _Held
    token_ids: Sequence[int]
    start: int


class DraftModel:
    """
    Invariant: of each request in `_held`, KV of its first `num_computed` tokens is there.
    """

    def __init__(
        self,
        manager: VTensorManager,
        runner: ModelRunner,
        max_len: int,
        max_step_tokens: int,
        share: float,
        *,
        caches_prefixes: bool = True,
    ) -> None:
        """max_len: most tokens of a request; longer ones are not drafted. share: of all KV memory,
        the part of this model. caches_prefixes: what ended requests leave is kept for others."""
        self.manager = manager
        self._share = share
        self._runner = runner
        self._max_len = max_len
        self._max_step_tokens = max_step_tokens
        self._caches_prefixes = caches_prefixes
        self._held: dict[Request, _Held] = {}
        self._caught_up = False

    @property
    def caught_up(self) -> bool:
        """The last `propose` had more than the last tokens of a request to compute: its prompt, or
        an answer that went on without proposals."""
        return self._caught_up

    def vtensors(self) -> list[tuple[Request, VTensor]]:
        """What requests hold here."""
        return [(request, held.vtensor) for request, held in self._held.items()]

    def outlook(self, request: Request, most: int) -> Outlook:
        num_left = self._max_len - request.num_tokens
        if num_left <= 0:
            self.forget([request])  # it only grows: others can do with its memory
        return Outlook(max(0, min(most, num_left)))

    def propose(
        self, requests: Sequence[Request], lengths: Sequence[int]
    ) -> Sequence[Sequence[int]]:
        ready = self._catch_up(requests, lengths)
        drafted: dict[Request, list[int]] = {request: [] for request in requests}
        rows = {request: self._last_row(request) for request in ready}
        for place in range(max(lengths)):
            wanting = [r for r in rows if lengths[ready[r]] > place]
            if not wanting:
                break
            tokens = self._compute([rows[request] for request in wanting])
            for request, token in zip(wanting, tokens, strict=True):
                drafted[request].append(token)
                held = self._held[request]
                held.num_computed = rows[request].start + len(rows[request].token_ids)
                rows[request] = _Row(held, (token,), held.num_computed)
        for request in ready:
            self._held[request].num_known = request.num_tokens
            self._held[request].drafted = drafted[request]
        self._give_back(requests)
        return list(drafted.values())

    def forget(self, ended: Iterable[Request]) -> None:
        for request in ended:
            held = self._held.pop(request, None)
            if held is None:
                continue
            if self._caches_prefixes:
                self._truncate(request, held)
                held.vtensor.record_prefix(request.token_array[: held.num_computed])
            held.vtensor.release()

    def release_all(self) -> int:
        """Forget everything, and give all memory back: before sleep, or another budget. Returns how
        many bytes."""
        resident_bytes = self.manager.resident_bytes
        for held in self._held.values():
            held.vtensor.release()
        self._held.clear()
        self.manager.reset_prefix_cache()
        self.manager.trim()
        return resident_bytes - self.manager.resident_bytes

    def split(self, size: int | str) -> tuple[int, int]:
        """The engine's part of KV memory, and the part of this model, in bytes. Raises ValueError
        if that holds no token."""
        total = parse_bytes(size, "KV cache memory")
        drafts = int(total * self._share)
        if drafts < self.manager.bytes_for(1):
            raise ValueError(
                f"of {total} bytes of KV cache memory the draft model has {self._share:.1%}, which "
                f"holds no token of it: that takes {self.manager.bytes_for(1)} bytes"
            )
        return total - drafts, drafts

    def set_budget(self, budget: int) -> BudgetChange:
        """Less memory is had by forgetting everything."""
        old_bytes, start_s = self.manager.memory_budget, time.perf_counter()
        returned_bytes = self.release_all() if budget < old_bytes else 0
        self.manager.memory_budget = budget
        return BudgetChange(
            old_bytes=old_bytes,
            new_bytes=self.manager.memory_budget,
            returned_bytes=returned_bytes,
            num_preempted=0,
            seconds=time.perf_counter() - start_s,
        )

    def close(self) -> None:
        self._held.clear()
        self.manager.close()

    def _catch_up(self, requests: Sequence[Request], lengths: Sequence[int]) -> dict[Request, int]:
        """Compute what is missing before the last tokens, as far as a step allows; returns the
        requests that have all of it, and memory for their proposals, with their indices."""
        num_left = self._max_step_tokens
        rows, ready = [], {}
        for i, (request, length) in enumerate(zip(requests, lengths, strict=True)):
            held = self._hold(request, requests)
            if held is None:
                continue
            self._truncate(request, held)
            start, last = held.num_computed, request.num_tokens - 1
            end = start if last - start <= MAX_LAST_TOKENS else min(last, start + num_left)
            is_ready = last - end <= MAX_LAST_TOKENS
            if not held.vtensor.try_extend(last + length if is_ready else end):
                continue
            if end > start:
                rows.append(_Row(held, request.token_ids[start:end], start))
                num_left -= end - start
                held.num_computed = end
            if is_ready:
                ready[request] = i
        self._caught_up = bool(rows)
        if rows:
            self._compute(rows)
        return ready

    def _hold(self, request: Request, wanted: Sequence[Request]) -> _Held | None:
        """None: memory or slots are short."""
        held = self._held.get(request)
        if held is not None:
            return held
        vtensor = self._try_create(request, wait=False)
        if vtensor is None:
            idle = [other for other in self._held if other not in wanted]
            if not idle:
                return None
            self.forget(idle)
            vtensor = self._try_create(request, wait=True)
        if vtensor is None:
            return None
        held = self._held[request] = _Held(vtensor, vtensor.num_cached_tokens)
        return held

    def _try_create(self, request: Request, *, wait: bool) -> VTensor | None:
        return self.manager.try_create(
            request.token_array,
            cache_salt=request.cache_salt,
            max_cached_tokens=request.num_tokens - 1,
            wait=wait,
        )

    def _truncate(self, request: Request, held: _Held) -> None:
        """Keep the KV of tokens that the request really has, its last one's apart."""
        came = request.token_ids[held.num_known :]
        num_right = 0
        for ours, theirs in zip(held.drafted, came, strict=False):
            if ours != theirs:
                break
            num_right += 1
        if held.drafted:
            held.num_computed = min(held.num_computed, held.num_known + num_right)
            held.drafted = []
        held.num_computed = min(held.num_computed, request.num_tokens - 1)
        if held.vtensor.num_tokens > held.num_computed:
            held.vtensor.truncate(held.num_computed)

    def _give_back(self, requests: Iterable[Request]) -> None:
        """What windows have left; what is rejected begins behind the last token at least."""
        held = [(request, self._held[request]) for request in requests if request in self._held]
        ends = [min(one.num_computed, request.num_tokens - 1) for request, one in held]
        self.manager.forget([one.vtensor for _, one in held], ends)

    def _last_row(self, request: Request) -> _Row:
        held = self._held[request]
        return _Row(held, request.token_ids[held.num_computed :], held.num_computed)

    def _compute(self, rows: Sequence[_Row]) -> list[int]:
        """The most probable token after each; KV of all is written."""
        order = sorted(range(len(rows)), key=lambda i: len(rows[i].token_ids) > 1)
        rows = [rows[i] for i in order]  # those of one token first
        token_ids = array("i", [token for row in rows for token in row.token_ids])
        ends = [row.start + len(row.token_ids) for row in rows]
        last_rows, row_end = [], 0
        for row in rows:
            row_end += len(row.token_ids)
            last_rows.append(row_end - 1)
        plan = StepPlan(
            token_ids=token_ids.tobytes(),
            slots=tuple([row.held.vtensor.slot for row in rows]),
            starts=tuple([row.start for row in rows]),
            ends=tuple(ends),
            num_decodes=sum(len(row.token_ids) == 1 for row in rows),
            sampled_rows=tuple(last_rows),
        )
        logits = self._runner.forward(self._runner.inputs.build(plan))
        tokens = dict(zip(order, logits[: len(rows)].argmax(-1).tolist(), strict=True))
        return [tokens[i] for i in range(len(rows))]
