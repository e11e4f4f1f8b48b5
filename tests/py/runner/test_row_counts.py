"""Padding: batches have few different numbers of rows where each costs a compilation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer import AsyncLLM, LLMEngine
from flexinfer.layers.onednn_linear import OneDnnLinear
from flexinfer.runner.inputs import InputBuilder, padded_count
from flexinfer.runner.model_runner import ModelRunner
from helpers.engine_kit import drain, make_engine, submit
from helpers.tiny_models import make_model, random_prompts

PROMPTS = random_prompts((3, 5, 9, 21, 40), seed=5)


@pytest.fixture
def engine() -> Iterator[LLMEngine]:
    engine = make_engine(max_num_seqs=8)
    engine.runner.inputs = InputBuilder(
        engine.loaded.device, engine.runner.backend.sharing_cost, pads_rows=True
    )
    yield engine
    engine.close()


def test_there_are_few_row_counts_none_far_above_the_real_one() -> None:
    counts = range(1, 4097)
    padded = [padded_count(count) for count in counts]
    assert all(p >= count for p, count in zip(padded, counts, strict=True))
    assert len(set(padded[:64])) == 11
    assert len(set(padded)) <= 104
    assert max(p / count for p, count in zip(padded[256:], counts[256:], strict=True)) <= 1.0625
    assert [padded_count(p) for p in padded] == padded


def test_rows_of_padding_change_no_token(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ModelRunner.forward
    row_counts = set()

    def watched(self: ModelRunner, inputs: Any) -> torch.Tensor:
        row_counts.add(len(inputs.token_ids))
        logits = real(self, inputs)
        assert torch.isfinite(logits).all()
        return logits

    monkeypatch.setattr(ModelRunner, "forward", watched)
    submit(engine, PROMPTS)
    padded = drain(engine)
    assert row_counts == {padded_count(count) for count in row_counts}
    plain_engine = make_engine(max_num_seqs=8)
    submit(plain_engine, PROMPTS)
    plain = drain(plain_engine)
    plain_engine.close()
    assert {i: o.outputs for i, o in padded.items()} == {i: o.outputs for i, o in plain.items()}


def test_padding_alone_can_be_computed_without_any_kv(engine: LLMEngine) -> None:
    logits = engine.runner.forward(engine.runner.inputs.build_padding(24, 8))
    assert logits.shape == (8, engine.loaded.vocab_size)
    assert engine.manager.stats().num_vtensors == 0


def test_a_model_that_onednn_compiles_for_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    has_packed = any(isinstance(m, OneDnnLinear) for m in engine.loaded.model.modules())
    assert engine.runner.inputs.pads_rows == has_packed
    engine.close()
    monkeypatch.setattr(type(engine.loaded.model), "compiles_row_counts", True, raising=False)
    engine = make_engine()
    assert engine.runner.inputs.pads_rows
    engine.close()


def test_a_server_compiles_for_the_usual_row_counts_before_it_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row_counts = []
    monkeypatch.setattr(
        ModelRunner, "forward", lambda self, inputs: row_counts.append(len(inputs.token_ids))
    )
    engine = make_engine()
    monkeypatch.setattr(type(engine.loaded.model), "compiles_row_counts", True, raising=False)
    engine.close()
    llm = AsyncLLM(
        make_model("llama"), skip_tokenizer_init=True, kv_cache_memory_bytes=4 << 20,
        max_num_batched_tokens=64,
    )  # fmt: skip
    llm.shutdown()
    assert row_counts == [1, 2, 4, *range(8, 65, 8)]
