"""Models with a recurrent state beside KV say what transformers say, and have a prefix cache."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer import BeamSearchParams, SamplingParams, UnsupportedModelError
from flexinfer.replay.replay import replay
from helpers.engine_kit import drain, submit
from helpers.engine_kit import make_engine as make_llama_engine
from helpers.hybrids import HYBRIDS, continuation, make_engine, make_hybrid
from helpers.tiny_models import random_prompts

NUM_NEW = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW)


def check(name: str, final: dict[str, Any], prompts: list[list[int]]) -> None:
    for i, prompt in enumerate(prompts):
        expected = continuation(name, tuple(prompt), NUM_NEW)
        assert final[str(i)].outputs[0].token_ids == expected, i


@pytest.mark.parametrize("caches", [False, True], ids=["uncached", "cached"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_tokens_are_those_of_transformers_whatever_happens(name: str, caches: bool) -> None:
    """Prompts in parts, beside decodes, of one token, with shared beginnings; some preempted."""
    rng = random.Random(f"{name} {caches}")
    engine = make_engine(
        name,
        preemption_mode=rng.choice(["recompute", "swap"]),
        swap_space="8MiB",
        max_num_batched_tokens=rng.choice([7, 32]),
        enable_prefix_caching=caches,
        layers_per_plane=rng.choice([None, 1]),
    )
    prompts = random_prompts((50, 70, 1, 33, 41), seed=1)
    prompts[3][:20] = prompts[0][:20]
    prompts[4][:36] = prompts[0][:36]
    submit(engine, prompts, GREEDY)
    final = drain(engine, rng)
    check(name, final, prompts)
    engine.close()


def test_a_conversation_goes_on_at_the_end_of_its_last_turn() -> None:
    engine = make_engine("qwen3_next", state_snapshot_tokens=0)
    prompt = random_prompts((40,))[0]
    engine.add_request("0", prompt, GREEDY)
    first = drain(engine)["0"].outputs[0].token_ids
    again = [*prompt, *first, *random_prompts((10,), seed=5)[0]]
    engine.add_request("0", again, GREEDY)
    final = drain(engine)
    assert final["0"].num_cached_tokens == len(prompt) + NUM_NEW - 1
    check("qwen3_next", final, [again])
    engine.close()


def test_a_hit_starts_at_the_last_snapshot_at_or_below_the_match() -> None:
    engine = make_engine("bamba")
    one, other = random_prompts((60, 60), seed=2)
    other[:45] = one[:45]
    for prompt, num_cached, limit in (
        (one, 0, "not recorded"),
        (other, 32, "state"),  # KV is shared up to token 45
        (one, 48, "state"),
    ):
        engine.add_request("0", prompt, GREEDY)
        final = drain(engine)
        assert final["0"].num_cached_tokens == num_cached
        assert final["0"].cache_limit == limit
        check("bamba", final, [prompt])
    engine.close()


def test_what_one_tenant_has_computed_no_other_finds() -> None:
    engine = make_engine("bamba")
    prompt = random_prompts((40,))[0]
    for salt, num_cached in (("a", 0), ("b", 0), ("a", 32)):
        engine.add_request("0", {"prompt_token_ids": prompt, "cache_salt": salt}, GREEDY)
        assert drain(engine)["0"].num_cached_tokens == num_cached
    engine.close()


def test_snapshots_that_were_evicted_are_missed_and_the_prompt_is_computed() -> None:
    engine = make_engine("bamba")
    prompt = random_prompts((40,))[0]
    for _ in range(2):
        engine.add_request("0", prompt, GREEDY)
        final = drain(engine)
        assert final["0"].num_cached_tokens == 0
        check("bamba", final, [prompt])
        engine.manager.reset_prefix_cache()
    assert len(engine.scheduler.states.snapshots) == 5  # at 16, 32, 40, 48 and 51 tokens
    engine.close()


@pytest.mark.parametrize("name", ["qwen3_next", "jamba"])
def test_samples_go_on_from_one_prompt_each_with_a_state_of_its_own(name: str) -> None:
    """The same seed alone draws the same tokens."""
    engine = make_engine(name)
    prompt = random_prompts((37,))[0]
    params = SamplingParams(temperature=1.0, max_tokens=NUM_NEW, seed=3, n=3)
    engine.add_request("0", prompt, params)
    together = [completion.token_ids for completion in drain(engine)["0"].outputs]
    assert len(set(map(tuple, together))) == 3
    for idx in range(3):
        alone = SamplingParams(temperature=1.0, max_tokens=NUM_NEW, seed=3 + idx)
        engine.add_request("0", prompt, alone)
        assert drain(engine)["0"].outputs[0].token_ids == together[idx]
    engine.close()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("name", ["qwen3_next", "bamba"])
def test_beams_score_what_the_model_says_of_them_though_some_are_preempted(
    name: str, mode: str
) -> None:
    """Beams fork and die: a state that is another beam's would give its tokens other scores."""
    engine = make_engine(name, max_num_seqs=8, preemption_mode=mode, swap_space="8MiB")
    prompts = random_prompts((37, 20), seed=6)
    submit(engine, prompts, BeamSearchParams(beam_width=3, max_tokens=NUM_NEW))
    final = drain(engine, random.Random(name), 0.3)
    assert sum(engine.stats().preemptions[mode].values()) > 0
    for i, prompt in enumerate(prompts):
        beams = final[str(i)].outputs
        assert len({tuple(beam.token_ids) for beam in beams}) == 3
        for beam in beams:
            ids = torch.tensor([[*prompt, *beam.token_ids]])
            with torch.no_grad():
                scores = make_hybrid(name)(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            expected = scores[torch.arange(NUM_NEW), ids[0, len(prompt) :]].sum().item()
            assert beam.cumulative_logprob == pytest.approx(expected, abs=1e-3)
    engine.close()


def test_a_step_that_fails_leaves_the_states_as_they_were(monkeypatch: Any) -> None:
    """Each step is computed twice: the first time sampling fails."""
    engine = make_engine("nemotron_h", enable_prefix_caching=False)
    runner = engine.runner
    sample, failed = runner.sample, []

    def sample_later(logits: Any, plan: Any) -> Any:
        if len(plan.starts) > 1 or plan in failed:
            return sample(logits, plan)
        failed.append(plan)
        raise torch.OutOfMemoryError("for this once")

    monkeypatch.setattr(runner, "sample", sample_later)
    monkeypatch.setattr(
        engine._steps.execution._torch_memory, "is_shortage", lambda _: True, raising=False
    )
    prompts = random_prompts((20,))
    submit(engine, prompts, GREEDY)
    check("nemotron_h", drain(engine), prompts)
    assert len(failed) > NUM_NEW - 1
    engine.close()


def test_states_sleep_and_wake_with_the_pool() -> None:
    engine = make_engine("granitemoehybrid")
    prompts = random_prompts((30, 20))
    submit(engine, prompts, GREEDY)
    for _ in range(5):
        engine.step()
    engine.sleep()
    engine.wake_up()
    check("granitemoehybrid", drain(engine), prompts)
    engine.close()


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_trace_of_states_is_replayed(mode: str, tmp_path: Path) -> None:
    """Two turns, preempted at random: the replay finds the prefixes and moves the chunks of both
    KV and states that the run did."""
    engine = make_engine("bamba", preemption_mode=mode, swap_space="16MiB", chunk_bytes=4096)
    engine.manager.start_trace(tmp_path / "trace.jsonl")
    prompts = random_prompts((60, 20, 45, 33))
    for turn in range(2):
        submit(engine, prompts, SamplingParams(temperature=0, max_tokens=10))
        final = drain(engine, random.Random(turn), 0.2)
        prompts = [p + final[str(i)].outputs[0].token_ids + [1] for i, p in enumerate(prompts)]
    stats = engine.manager.stats()
    engine.manager.stop_trace()
    engine.close()
    report = replay(tmp_path / "trace.jsonl")
    assert not report.shortages
    for name in ("prefix_hit_tokens", "chunks_copied", "chunks_swapped_in"):
        assert getattr(report.replayed, name) == getattr(stats, name)
    assert stats.prefix_hit_tokens > 0
    assert (stats.chunks_swapped_in > 0) == (mode == "swap")


def test_little_memory_is_enough_for_one_request_and_all_get_their_turn() -> None:
    engine = make_engine("bamba")
    manager = engine.manager
    state_bytes = manager.spec.state_bytes(manager.chunk_bytes)
    engine.close()
    budget = manager.bytes_for(100) + 2 * state_bytes
    engine = make_engine("bamba", kv_cache_memory_bytes=budget, max_model_len=100)
    prompts = random_prompts((60, 70, 50), seed=4)
    submit(engine, prompts, GREEDY)
    check("bamba", drain(engine), prompts)
    submit(engine, random_prompts((85,)), GREEDY)
    engine.step()
    with pytest.raises(ValueError, match="too little for request"):
        engine.set_kv_cache_memory(budget - 2 * state_bytes)
    engine.close()
    with pytest.raises(ValueError, match=f"{2 * state_bytes} of them for its recurrent state"):
        make_engine("bamba", kv_cache_memory_bytes=budget - 4096, max_model_len=100)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "cannot go back",
        ),
        ({"async_scheduling": True}, "async_scheduling does not go with Bamba"),
        ({"compile": True}, "compile does not go with Bamba"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype='int8' does not go with Bamba"),
    ],
)
def test_what_does_not_go_with_a_state_is_refused_by_name(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        make_engine("bamba", **settings)


def test_a_draft_model_with_a_state_is_refused_by_name() -> None:
    settings = {"method": "draft_model", "num_speculative_tokens": 2, "model": make_hybrid("bamba")}
    with pytest.raises(ValueError, match="draft model BambaForCausalLM keeps a recurrent state"):
        make_llama_engine(speculative_config=settings)


def test_the_model_is_as_before_between_steps() -> None:
    engine = make_engine("jamba")
    engine.add_request("0", [1, 2, 3], GREEDY)
    drain(engine)
    assert not any("forward" in vars(module) for module in make_hybrid("jamba").modules())
    engine.close()


def test_a_budget_for_less_than_a_state_is_refused_with_what_the_state_takes() -> None:
    message = r"\d+ of them for its recurrent state: raise kv_cache_memory_bytes"
    with pytest.raises(ValueError, match=message):
        make_engine("qwen3_next", kv_cache_memory_bytes=32 << 10, max_model_len=256)
