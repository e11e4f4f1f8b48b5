"""Speculation: which requests get proposals, how long ones, and what becomes of them. No torch.

    tokens known   | p0 p1 ... pn |                        KV of all but the last
    step           |           pn | d1 d2 d3 |             computed together, into the same range
    drawn          |           d1   d2   x    .            d3 was not drawn: it is rejected, and so
    tokens known   | p0 p1 ... pn d1 d2 x |                is all after it; truncate() to before x

A proposal is written ahead into the request's own range, and the model's own token is drawn after
each of its tokens, with the same random number as without speculation. Proposed tokens that are
drawn are kept, the first that is not is replaced by what was drawn. That is rejection sampling
(Leviathan et al., 2023; Chen et al., 2023) for a proposal that names one token: it is accepted with
the probability p that the model gives it, else the token comes from p without it. Nothing is
copied: rejection lowers a length.

How long proposals are is chosen for all requests of a step together: most probable tokens first,
as long as expected tokens per second grow, by the learned `Acceptance` and `StepCosts`. Where that
is never, or hardly, steps go without. Not thread-safe.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

from flexinfer.metrics.speculation import SpeculationStats
from flexinfer.scheduler.batch import Batch, ScheduledRequest
from flexinfer.scheduler.request import Request
from flexinfer.speculation.acceptance import Acceptance
from flexinfer.speculation.drafter import Drafter, Outlook
from flexinfer.speculation.step_costs import StepCosts

if TYPE_CHECKING:
    from flexinfer.vtensor import VTensorManager


logger = logging.getLogger(__name__)

LEAST_GAIN = 1.03
"""Of tokens per second, for which it is worth to propose any: costs are not known better."""
CLEAR_GAIN = 1.3
"""From which on no step without proposals is spent on measuring what one takes."""


class Speculation:
    """
    Invariant: `_acceptance` has no request that has been forgotten.
    """

    def __init__(
        self,
        num_speculative_tokens: int,
        drafter: Drafter,
        manager: VTensorManager,
        max_num_batched_tokens: int,
    ) -> None:
        self._num_speculative_tokens = num_speculative_tokens
        self._drafter = drafter
        self._is_off = False
        """Since the drafter has failed."""
        self._manager = manager
        self._max_num_batched_tokens = max_num_batched_tokens
        self._costs = StepCosts()
        self._acceptance: dict[Request, Acceptance] = {}
        self._num_requests = 0  # of the step under way
        self._num_further: int | None = None
        self.stats = SpeculationStats(num_speculative_tokens)

    def draft(self, batch: Batch) -> None:
        """Add proposals to a scheduled step, where they pay and memory is there for them."""
        decodes = {i: item for i, item in enumerate(batch.items) if _decodes(item)}
        self._num_requests = len(decodes)
        num_others = batch.num_tokens - len(decodes)
        self._num_further = None if num_others else 0
        if self._is_off or not decodes or batch.preempted or batch.failed:
            return
        outlooks = [self._outlook(item.request) for item in decodes.values()]
        lengths = self._choose_lengths(list(decodes.values()), outlooks, num_others)
        try:
            drafted = self._propose(decodes, lengths)
        except Exception:
            logger.exception("proposing tokens has failed: this engine speculates no more")
            self._is_off = True
            return
        if any(lengths) and self._drafter.caught_up:
            self._num_further = None
        if drafted and self._extend(drafted.values()):
            for i, item in drafted.items():
                batch.items[i] = item
            if self._num_further is not None:
                self._num_further = sum(len(item.draft) for item in drafted.values())

    def settle(
        self,
        batch: Batch,
        tokens: Iterable[tuple[Request, int]],
        failures: Sequence[tuple[Request, str]] = (),
    ) -> list[tuple[Request, str]]:
        """The step has given these tokens: take back what was rejected, as if it had not been
        scheduled. Returns those of the failures that end their requests.

        A proposal may be why a request failed: what attention masks still poisons a row if it is
        NaN. All of it is taken back then, the token before it included, to be computed again alone.
        """
        got: dict[Request, list[int]] = {}
        for request, token_id in tokens:
            got.setdefault(request, []).append(token_id)
        given_up: set[Request] = set()
        for i, item in enumerate(batch.items):
            request, drawn = item.request, got.get(item.request, [])
            acceptance = self._acceptance.get(request)
            if item.draft:
                num_accepted = max(0, len(drawn) - 1)
                batch.items[i] = self._take_back(item, len(drawn))
                self.stats.note(len(item.draft), num_accepted)
                if acceptance is not None:
                    acceptance.observe(len(item.draft), num_accepted)
                if not drawn and request.may_speculate:
                    given_up.add(request)
                    request.may_speculate = False
                if not request.may_speculate:
                    self.forget([request])
            elif acceptance is not None and drawn:
                acceptance.observe_token(drawn[0])
        return [failure for failure in failures if failure[0] not in given_up]

    def observe(self, step_us: float) -> None:
        """The step took so long, all of it."""
        if self._num_further is not None and self._num_requests:
            self._costs.observe(self._num_requests, self._num_further, step_us)

    def forget(self, ended: Sequence[Request]) -> None:
        for request in ended:
            self._acceptance.pop(request, None)
        self._drafter.forget(ended)

    def _outlook(self, request: Request) -> Outlook:
        most = request.max_num_tokens - request.num_tokens - 1  # the last one is drawn
        most = min(most, self._num_speculative_tokens)
        if most <= 0 or not request.may_speculate:
            return Outlook(0)
        acceptance = self._acceptance.setdefault(request, Acceptance())
        outlook = self._drafter.outlook(request, most)
        acceptance.guess(outlook.known)
        return outlook

    def _propose(
        self, decodes: Mapping[int, ScheduledRequest], lengths: Sequence[int]
    ) -> dict[int, ScheduledRequest]:
        """Those of the items that get a proposal, with it."""
        chosen = {i: length for i, length in zip(decodes, lengths, strict=True) if length}
        if not chosen:
            return {}
        requests = [decodes[i].request for i in chosen]
        proposals = self._drafter.propose(requests, list(chosen.values()))
        return {
            i: replace(decodes[i], end=decodes[i].end + len(draft), draft=tuple(draft))
            for i, proposal in zip(chosen, proposals, strict=True)
            if (draft := before_stop(proposal, decodes[i].request))
        }

    def _choose_lengths(
        self,
        items: Sequence[ScheduledRequest],
        outlooks: Sequence[Outlook],
        num_others: int,
    ) -> list[int]:
        """How long a proposal of each to verify, for the most tokens per second.

        num_others: tokens of the step that are not of these items.
        """
        gains = [
            (probability, i)
            for i, (item, outlook) in enumerate(zip(items, outlooks, strict=True))
            if outlook.num_tokens > 0
            for probability in self._acceptance[item.request].probabilities(outlook.num_tokens)
        ]
        num_left = self._max_num_batched_tokens - len(items) - num_others
        costs = self._costs.estimate(len(items), num_others + len(gains)) if gains else None
        if costs is None:
            return [0] * len(items)
        gains.sort(key=lambda gain: -gain[0])  # stable: a request's own stay in order
        expected = accumulate((gain for gain, _ in gains[: max(0, num_left)]), initial=len(items))
        rates = [tokens / cost for tokens, cost in zip(expected, costs[num_others:], strict=False)]
        best = max(range(len(rates)), key=rates.__getitem__)
        gain = rates[best] / rates[0]
        is_doubtful = gain < CLEAR_GAIN and not num_others and self._costs.is_base_old(len(items))
        if gain < LEAST_GAIN or is_doubtful:
            best = 0
        counts = Counter(i for _, i in gains[:best])
        return [counts[i] for i in range(len(items))]

    def _extend(self, items: Iterable[ScheduledRequest]) -> bool:
        """Memory for the proposals, all or none; nobody is preempted for them."""
        growing = [item for item in items if item.end > item.request.num_extended_tokens]
        ends = [item.end for item in growing]
        if growing and not self._manager.try_extend([item.vtensor for item in growing], ends):
            return False
        for item in growing:
            item.request.num_extended_tokens = item.end
        return True

    def _take_back(self, item: ScheduledRequest, num_kept: int) -> ScheduledRequest:
        """The item with so many of its tokens: a token was drawn behind each of them. The memory of
        the others stays mapped for the next ones."""
        end = item.start + num_kept
        if end < item.end:
            item.vtensor.truncate(end)
            item.request.num_extended_tokens = end
        return replace(item, end=end, draft=())


def _decodes(item: ScheduledRequest) -> bool:
    """Whether it computes one token, whose successor is not known: the plain case of a decode."""
    return item.samples and not item.request.is_prefilling and item.num_tokens == 1


def before_stop(proposal: Sequence[int], request: Request) -> Sequence[int]:
    """Up to a token that would end the request: nothing after it is needed, and it is drawn without
    being proposed."""
    stops = request.stop_token_ids
    end = next((i for i, token_id in enumerate(proposal) if token_id in stops), len(proposal))
    return proposal[:end]
