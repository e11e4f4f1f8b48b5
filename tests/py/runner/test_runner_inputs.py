"""A step's tensors equal what plain Python lists would say, whatever the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st

from flexinfer.engine.plan_builder import PlanBuilder
from flexinfer.outputs import RequestMetrics
from flexinfer.runner.inputs import InputBuilder
from flexinfer.runner.plan import StepPlan, StepResult
from flexinfer.sampling.params import SamplingParams
from flexinfer.scheduler.batch import ScheduledRequest
from flexinfer.scheduler.request import Request


@dataclass
class Slot:
    slot: int


def make_item(slot: int, start: int, num_new: int, samples: bool, num_siblings: int) -> Any:
    tokens = [1000 * slot + i for i in range(start + num_new + (0 if samples else 3))]
    request = Request(
        request_id=str(slot),
        prompt_token_ids=tokens,
        params=SamplingParams(),
        max_num_tokens=5000,
        metrics=RequestMetrics(arrival_time=0.0),
    )
    request.siblings = [
        request.clone(f"{slot}#{i}", i, request.params) for i in range(num_siblings)
    ]
    return ScheduledRequest(request, cast(Any, Slot(slot)), start, start + num_new, samples)


ITEM = st.tuples(st.integers(0, 40), st.sampled_from([1, 1, 2, 30, 700]), st.booleans())
BUILDER = InputBuilder(torch.device("cpu"))


class NoExecutor:
    """Plans are built for it, never executed."""

    uses_shared_ranges = False

    def execute(self, plan: StepPlan) -> StepResult:
        raise NotImplementedError

    def forget(self, sampling_ids: Sequence[int]) -> None:
        raise NotImplementedError


def make_plan(items: list[ScheduledRequest]) -> StepPlan:
    return PlanBuilder(NoExecutor(), lambda vtensors, starts: []).build(items)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(ITEM, min_size=1, max_size=9), num_siblings=st.integers(0, 2))
def test_inputs_equal_plain_lists(lengths: list[tuple[int, int, bool]], num_siblings: int) -> None:
    items = [make_item(slot, *length, num_siblings) for slot, length in enumerate(lengths)]
    plan = make_plan(items)
    inputs = BUILDER.build(plan)
    ordered = [i for i in items if i.num_tokens == 1] + [i for i in items if i.num_tokens > 1]
    ids: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    sampling_ids: list[int] = []
    for item in ordered:
        ids += item.request.token_ids[item.start : item.end]
        positions += range(item.start, item.end)
        if item.samples:
            rows += [len(ids) - 1] * (1 + num_siblings)
            requests = (item.request, *item.request.siblings)
            sampling_ids += [request.sampling_id for request in requests]
    assert inputs.token_ids.tolist() == ids
    assert inputs.positions.tolist() == positions
    assert inputs.logits_rows.tolist() == rows
    assert list(plan.sampling_ids) == sampling_ids
    metadata = inputs.metadata
    decodes = [item for item in ordered if item.num_tokens == 1]
    assert metadata.decode_slots.tolist() == [item.vtensor.slot for item in decodes]
    assert metadata.decode_positions.tolist() == [item.start for item in decodes]
    assert [(s.slot, s.start, s.end) for s in metadata.segments] == [
        (item.vtensor.slot, item.start, item.end) for item in ordered
    ]


def test_a_request_grows_after_its_tokens_were_read() -> None:
    item = make_item(1, 0, 4, True, 0)
    BUILDER.build(make_plan([item]))
    item.request.append(77)
    later = ScheduledRequest(item.request, item.vtensor, 4, 5, True)
    inputs = BUILDER.build(make_plan([later]))
    assert inputs.token_ids.tolist() == [77]
    assert inputs.positions.tolist() == [4]
