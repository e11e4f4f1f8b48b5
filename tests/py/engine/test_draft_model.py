"""A draft model proposes: tokens stay those of the large model, memory is given back."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer import LLM, LLMEngine, SamplingParams
from flexinfer.engine.draft_model import DraftModel
from flexinfer.speculation.step_costs import StepCosts
from helpers.engine_kit import check, drain, make_engine, preempt_at_random, submit
from helpers.tiny_models import (
    make_model,
    make_tokenizer,
    random_prompts,
    reference,
    save_chat_model,
)

NUM_NEW = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW)
PROMPTS = random_prompts((20, 33, 7, 41))


@pytest.fixture(autouse=True)
def it_always_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepCosts, "estimate", lambda _, num, further: [1.0] * (further + 1))


def drafting(model: Any = None, of: Any = "llama", **settings: Any) -> LLMEngine:
    """By default with the model itself as its draft: all that it proposes is right."""
    config = {"method": "draft_model", "num_speculative_tokens": 3}
    config["model"] = make_model("llama") if model is None else model
    return make_engine(of, speculative_config=config, kv_cache_memory_bytes="8MiB", **settings)


def draft_of(engine: LLMEngine) -> DraftModel:
    assert engine.draft_model is not None
    return engine.draft_model


def drain_both(engine: LLMEngine) -> dict[str, Any]:
    final = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            final[output.request_id] = output
        engine.manager.check_integrity()
        draft_of(engine).manager.check_integrity()
    assert draft_of(engine).manager.stats().num_vtensors == 0
    return final


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 7}, {"layers_per_plane": 1}])
@pytest.mark.parametrize("seed", [0, 1])
def test_greedy_tokens_are_those_of_transformers(seed: int, settings: dict[str, Any]) -> None:
    engine = drafting(make_model("llama", seed), **settings)
    submit(engine, PROMPTS, GREEDY)
    check(drain_both(engine), PROMPTS, NUM_NEW)
    stats = engine.stats().speculation
    assert stats is not None
    assert stats.num_draft_tokens > 4
    if seed == 0:  # the same model: all is right, and every fourth token is drawn without
        assert stats.num_accepted_tokens == stats.num_draft_tokens
    engine.close()


def test_what_was_rejected_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same model, the first wrong token of each proposal is one that was made wrong."""
    rng, compute, propose = random.Random(0), DraftModel._compute, DraftModel.propose
    known = [p + reference("llama", tuple(p), NUM_NEW) for p in PROMPTS]
    wrong: list[int] = []

    def mistaken(self: DraftModel, rows: Any) -> list[int]:
        return [token ^ (rng.random() < 0.2) for token in compute(self, rows)]

    def checked(self: DraftModel, requests: Any, lengths: Any) -> Any:
        proposals = propose(self, requests, lengths)
        for request, proposal in zip(requests, proposals, strict=True):
            coming = known[int(request.request_id)][request.num_tokens :]
            pairs = zip(proposal, coming, strict=False)
            wrong.extend([a ^ b for a, b in pairs if a != b][:1])
        return proposals

    def at_times(_: StepCosts, num: int, further: int) -> list[float] | None:
        """Some steps go without: then more than one token comes between two proposals."""
        return [1.0] * (further + 1) if rng.random() < 0.6 else None

    monkeypatch.setattr(StepCosts, "estimate", at_times)
    monkeypatch.setattr(DraftModel, "_compute", mistaken)
    monkeypatch.setattr(DraftModel, "propose", checked)
    engine = drafting()
    submit(engine, PROMPTS, GREEDY)
    check(drain_both(engine), PROMPTS, NUM_NEW)
    assert len(wrong) > 5
    assert set(wrong) == {1}
    engine.close()


def test_a_seed_gives_the_same_tokens_with_a_draft_and_without() -> None:
    params = SamplingParams(seed=4, temperature=0.8, top_p=0.9, max_tokens=NUM_NEW)
    found = []
    for engine in (make_engine(), drafting()):
        submit(engine, PROMPTS, params)
        found.append({i: o.outputs[0].token_ids for i, o in drain(engine).items()})
        engine.close()
    assert found[0] == found[1]


def test_the_next_turn_and_its_fork_share_what_the_draft_has_computed() -> None:
    engine = drafting()
    submit(engine, PROMPTS[:1], GREEDY)
    said = PROMPTS[0] + drain_both(engine)["0"].outputs[0].token_ids
    manager = draft_of(engine).manager
    assert manager.match_prefix(said) >= len(said) - 5
    before = manager.stats().chunks_aliased + manager.stats().chunks_adopted
    turns = [[*said, *tail] for tail in random_prompts((5, 6), seed=3)]
    submit(engine, turns, GREEDY)
    check(drain_both(engine), turns, NUM_NEW)
    after = manager.stats()
    assert after.chunks_aliased + after.chunks_adopted > before
    assert after.prefix_hit_tokens > 0
    engine.close()


def test_without_prefix_caching_the_draft_keeps_nothing_either() -> None:
    engine = drafting(enable_prefix_caching=False)
    for _ in range(2):
        submit(engine, PROMPTS, GREEDY)
        check(drain_both(engine), PROMPTS, NUM_NEW)
    stats = draft_of(engine).manager.stats()
    assert stats.recorded_tokens == stats.prefix_hit_tokens == 0
    engine.close()


def test_preempted_requests_go_on_and_a_draft_without_memory_does_without() -> None:
    engine = drafting(preemption_mode="recompute", max_model_len=80)
    draft = draft_of(engine)
    draft.manager.memory_budget = 3 * draft.manager.bytes_for(30)
    rng = random.Random(1)
    submit(engine, PROMPTS, GREEDY)
    final = {}
    while engine.has_unfinished_requests():
        preempt_at_random(engine, rng, 0.2)
        for output in engine.step():
            final[output.request_id] = output
        draft.manager.check_integrity()
    check(final, PROMPTS, NUM_NEW)
    engine.close()


def test_sleep_and_a_smaller_budget_take_the_drafts_memory_too(tmp_path: Path) -> None:
    engine = drafting(swap_directory=str(tmp_path))
    submit(engine, PROMPTS, GREEDY)
    for _ in range(4):
        engine.step()
    draft = draft_of(engine).manager
    assert draft.stats().resident_bytes > 0
    resident_bytes = engine.manager.stats().resident_bytes + draft.stats().resident_bytes
    assert engine.sleep() == resident_bytes
    assert draft.stats().resident_bytes == 0
    engine.wake_up()
    change = engine.set_kv_cache_memory("4MiB")
    assert (change.old_bytes, change.new_bytes) == (8 << 20, 4 << 20)
    assert engine.manager.memory_budget + draft.memory_budget == 4 << 20
    assert draft.memory_budget == 2 << 20
    check(drain_both(engine), PROMPTS, NUM_NEW)
    engine.close()


def test_what_a_smaller_budget_gives_back_is_of_both_parts() -> None:
    engine = drafting()
    submit(engine, PROMPTS, GREEDY)
    drain_both(engine)
    managers = engine.manager, draft_of(engine).manager
    before = [manager.stats().resident_bytes for manager in managers]
    change = engine.set_kv_cache_memory("64KiB")
    after = [manager.stats().resident_bytes for manager in managers]
    assert all(old > new for old, new in zip(before, after, strict=True))
    assert change.returned_bytes == sum(before) - sum(after)
    assert engine.stats().as_dict()["draft_memory"]["budget_bytes"] == 32 << 10
    engine.close()


@pytest.mark.parametrize("size", ["16KiB", 0])
def test_a_budget_that_holds_no_token_of_the_draft_is_refused_before_it_changes_anything(
    size: str | int,
) -> None:
    engine = drafting(small_draft(), chunk_bytes=4096)
    before = engine.manager.memory_budget, draft_of(engine).manager.memory_budget
    with pytest.raises(ValueError, match=r"draft model has 11\.1%, .* takes 8192 bytes"):
        engine.set_kv_cache_memory(size)
    assert (engine.manager.memory_budget, draft_of(engine).manager.memory_budget) == before
    engine.close()


def test_what_is_too_little_for_the_draft_is_said_to_be_the_drafts() -> None:
    config = {"method": "draft_model", "num_speculative_tokens": 3, "model": small_draft()}
    with pytest.raises(ValueError, match=r"draft model LlamaForCausalLM, .* 11\.1% .*: memory_bud"):
        make_engine(speculative_config=config, kv_cache_memory_bytes="32KiB")


def test_a_draft_with_windows_gives_back_what_they_have_left() -> None:
    """Its window is 16 tokens, four layers of which a chunk holds four."""
    config = {"method": "draft_model", "num_speculative_tokens": 3, "model": make_model("mistral")}
    engine = make_engine("mistral", speculative_config=config, max_num_batched_tokens=32)
    prompts = random_prompts((100, 60))
    submit(engine, prompts, SamplingParams(temperature=0, max_tokens=40))
    manager, most = draft_of(engine).manager, 0
    final = {}
    while engine.has_unfinished_requests():
        final |= {output.request_id: output for output in engine.step()}
        manager.drain()
        manager.check_integrity()
        most = max(most, manager.stats().mapped_bytes)
    for i, prompt in enumerate(prompts):
        expected = reference("mistral", tuple(prompt), 40)
        assert final[str(i)].outputs[0].token_ids == expected
    assert most <= sum(manager.bytes_for(len(prompt) + 40) for prompt in prompts)
    stats = engine.stats().speculation
    assert stats is not None
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 20
    engine.close()


def test_a_draft_that_fails_ends_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: DraftModel, rows: Any) -> list[int]:
        raise ArithmeticError("cannot be computed")

    engine = drafting()
    submit(engine, PROMPTS, GREEDY)
    for _ in range(4):
        engine.step()
    monkeypatch.setattr(DraftModel, "_compute", fail)
    check(drain_both(engine), PROMPTS, NUM_NEW)
    engine.close()


def test_a_request_that_failed_with_a_proposal_goes_on_without_a_draft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the draft proposes is infinite in the model, and in the draft nothing of it is left."""
    model = copy.deepcopy(make_model("llama"))
    with torch.no_grad():
        model.get_input_embeddings().weight[127] = float("inf")
    prompts = [[token % 127 for token in prompt] for prompt in PROMPTS]
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, logit_bias={127: -100.0})
    found = []
    monkeypatch.setattr(DraftModel, "_compute", lambda _, rows: [127] * len(rows))
    for engine in (make_engine(model), drafting(of=model)):
        submit(engine, prompts, params)
        for _ in range(8):
            engine.step()
        if engine.draft_model is not None:
            assert draft_of(engine).manager.stats().num_vtensors == 0
            assert engine.stats().speculation.num_drafts == len(prompts)
        found.append({i: o.outputs[0] for i, o in drain(engine).items()})
        engine.close()
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "needs a model"),
        ({"model": "m", "prompt_lookup_max": 3}, "takes no prompt_lookup_max"),
        ({"model": "m", "method": "ngram"}, '"ngram" takes no model'),
    ],
)
def test_a_bad_configuration_is_refused(config: dict[str, Any], message: str) -> None:
    config = {"method": "draft_model", "num_speculative_tokens": 2, **config}
    with pytest.raises(ValueError, match=message):
        LLM("no-such-folder", speculative_config=config)


def test_another_vocabulary_is_refused_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from flexinfer.models import loading

    other = LlamaForCausalLM(
        LlamaConfig(vocab_size=77, hidden_size=16, num_hidden_layers=1, num_attention_heads=1)
    )
    monkeypatch.setattr(loading, "load_model", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ValueError, match="has a vocabulary of 77 tokens, the model one of"):
        drafting(other)


def small_draft() -> Any:
    """A draft of one layer for the tiny Llama, with an eighth of its bytes per token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    vocab_size = make_model("llama").config.vocab_size
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=vocab_size, num_hidden_layers=1, num_key_value_heads=1, **sizes)
    )


def small_folder(path: Path, *, tokenizer: Any = None) -> Path:
    """A draft of two layers for `save_chat_model`'s model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=270, num_hidden_layers=2, eos_token_id=1, **sizes)
    LlamaForCausalLM(config).save_pretrained(path)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    return path


def with_draft(folder: str, draft: Path, **settings: Any) -> LLM:
    config = {"method": "draft_model", "num_speculative_tokens": 2, "model": draft}
    return LLM(folder, kv_cache_memory_bytes="8MiB", speculative_config=config, **settings)


def test_another_tokenizer_is_refused_of_a_path_as_of_its_name(tmp_path: Path) -> None:
    folder = save_chat_model(tmp_path / "model")
    other = copy.deepcopy(make_tokenizer())
    other.add_special_tokens({"additional_special_tokens": ["<other>"]})
    draft = small_folder(tmp_path / "draft", tokenizer=other)
    with pytest.raises(ValueError, match="draft' has another tokenizer than the model"):
        with_draft(folder, draft)


def test_a_draft_of_weights_alone_proposes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    draft = small_folder(tmp_path / "draft")
    with with_draft(save_chat_model(tmp_path / "model"), draft) as llm:
        llm.generate("hello", SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
        stats = llm.llm_engine.stats().speculation
    assert stats is not None
    assert stats.num_drafts > 0
    assert "draft' has no tokenizer that can be loaded" in caplog.text


def test_a_layout_of_the_model_is_not_asked_of_a_draft_with_fewer_layers(tmp_path: Path) -> None:
    folder = save_chat_model(tmp_path / "model")
    with with_draft(folder, small_folder(tmp_path / "draft"), layers_per_plane=4) as llm:
        assert draft_of(llm.llm_engine).manager.spec.num_layers == 2


def test_to_catch_up_with_a_prompt_is_not_what_proposals_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a long prompt would end proposals for as long as its cost is believed."""
    observe, observed = StepCosts.observe, []

    def note(self: StepCosts, num_requests: int, num_further: int, step_us: float) -> None:
        observed.append(num_further)
        observe(self, num_requests, num_further, step_us)

    monkeypatch.setattr(StepCosts, "observe", note)
    engine = drafting()
    submit(engine, PROMPTS[:1], GREEDY)
    engine.step()  # the prompt, of the model
    engine.step()  # and of the draft
    stats = engine.stats().speculation
    assert stats is not None
    assert stats.num_drafts == 1
    assert observed == []
    engine.step()
    assert observed == [3]
    engine.close()


def test_requests_longer_than_the_draft_knows_are_not_drafted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = drafting()
    monkeypatch.setattr(draft_of(engine), "_max_len", 30)
    submit(engine, PROMPTS[:2], GREEDY)
    while (request := engine._groups["0"].leader).num_tokens <= 30:
        engine.step()
    engine.step()
    assert not request.is_finished
    assert draft_of(engine).manager.stats().num_vtensors == 0  # what it had is others' to use
    final = drain_both(engine)
    assert final["1"].outputs[0].token_ids == reference("llama", tuple(PROMPTS[1]), NUM_NEW)
    stats = engine.stats().speculation
    assert stats is not None
    assert 0 < stats.num_draft_tokens < 12
    engine.close()
