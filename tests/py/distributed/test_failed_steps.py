"""A model error on any rank fails one step on all of them: it ends its request, and no other."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from flexinfer import LLMEngine, SamplingParams
from flexinfer.distributed import group
from flexinfer.outputs import RequestOutput
from helpers.engine_kit import NUM_NEW
from helpers.failing_part import BAD_PROMPT, STAGES, fail_at, spawn_failing
from helpers.rank_kit import make_ranked_engine
from helpers.tiny_models import random_prompts, reference

PROMPTS = random_prompts((20, 33, 7, 12))


def run_beside_a_bad_one(engine: LLMEngine) -> dict[str, RequestOutput]:
    """The last output of each request; the bad one comes while others decode."""
    final = {}
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=NUM_NEW))
        if i == 2:
            engine.step()
            engine.add_request("bad", BAD_PROMPT, SamplingParams(prompt_logprobs=1, max_tokens=4))
    while engine.has_unfinished_requests():
        final.update({output.request_id: output for output in engine.step()})
    return final


@pytest.mark.parametrize(
    ("failing", "stage", "num_ranks"),
    [
        ((1,), "attention", 2),
        *(
            pytest.param(failing, stage, num_ranks, marks=pytest.mark.slow)
            for num_ranks, failing in ((2, (1,)), (2, (0,)), (2, (0, 1)), (4, (1, 2, 3)))
            for stage in STAGES
            if (failing, stage) != ((1,), "attention")
        ),
    ],
)
def test_a_request_that_fails_on_some_ranks_ends_alone(
    monkeypatch: pytest.MonkeyPatch, failing: tuple[int, ...], stage: str, num_ranks: int
) -> None:
    if failing != (0,):
        monkeypatch.setattr(group, "_spawn", spawn_failing(stage))
    engine = make_ranked_engine(num_ranks=num_ranks)  # compares the ranks' books in each step
    if 0 in failing:
        fail_at(stage, monkeypatch.setattr)
    try:
        final = run_beside_a_bad_one(engine)
        assert engine.manager.stats().num_vtensors == 0
        engine.sleep()  # all ranks agree once more
    finally:
        engine.close()
    bad = final.pop("bad")
    assert bad.outputs[0].finish_reason == "error"
    assert f"bad prompt in {stage}" in str(bad.outputs[0].stop_reason)
    for i, prompt in enumerate(PROMPTS):
        expected = reference("llama", tuple(prompt), NUM_NEW)
        assert final[str(i)].outputs[0].token_ids == expected
