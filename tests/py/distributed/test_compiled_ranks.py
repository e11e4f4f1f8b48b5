"""Compiled, each rank's part of a model is one graph, in which it exchanges tensors with others."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch._dynamo.utils import counters

from flexinfer.distributed import group
from helpers.captured_rank import capture_only, spawn_captured
from helpers.engine_kit import NUM_NEW, run
from helpers.rank_kit import make_ranked_engine
from helpers.tiny_models import random_prompts, reference

PROMPTS = random_prompts((20, 33, 7, 1, 12))


def check(name: str, num_ranks: int = 2) -> None:
    """The same tokens, of graphs that were all there before the first step."""
    torch._dynamo.reset()
    counters.clear()
    engine = make_ranked_engine(name, num_ranks, compile=True)
    try:
        num_graphs = counters["stats"]["unique_graphs"]
        final = run(engine, PROMPTS, NUM_NEW)
    finally:
        engine.close()
    for i, prompt in enumerate(PROMPTS):
        assert final[str(i)].outputs[0].token_ids == reference(name, tuple(prompt), NUM_NEW)
    assert sum(counters["graph_break"].values()) == 0
    assert 1 <= num_graphs <= 6
    assert counters["stats"]["unique_graphs"] == num_graphs


@pytest.mark.slow
def test_each_part_is_one_graph_and_generates_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group, "_spawn", spawn_captured)
    capture_only(monkeypatch.setattr)
    check("llama")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "tied", "gemma2", "mixtral", "cohere"])
def test_compiled_parts_match(name: str) -> None:
    check(name)
