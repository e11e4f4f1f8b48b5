"""A tensor-parallel engine says what one process says, in every decoding mode and shortage."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from flexinfer import LLMEngine, SamplingParams
from flexinfer.sampling.params import BeamSearchParams
from helpers.engine_kit import NUM_NEW, drain, make_engine, preempt_at_random, run, submit
from helpers.rank_kit import make_ranked_engine
from helpers.tiny_models import make_model, random_prompts, reference

PROMPTS = random_prompts((20, 33, 7, 41, 12))
TOKEN_BYTES = 2 * 4 * 1 * 16 * 4
"""K and V of one token of the tiny Llama on one of two ranks."""


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    """Two ranks of the tiny Llama, for tests that leave it as it was."""
    engine = make_ranked_engine(swap_space="4MiB", preemption_mode="swap")
    yield engine
    engine.close()


def tokens_of(engine: LLMEngine, params: SamplingParams | BeamSearchParams) -> list[list[int]]:
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, params)
    final = drain(engine)
    return [out.token_ids for i in range(len(PROMPTS)) for out in final[str(i)].outputs]


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "mixtral", "tied"])
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    engine = make_ranked_engine(name)
    try:
        final = run(engine, PROMPTS, NUM_NEW)
    finally:
        engine.close()
    for i, prompt in enumerate(PROMPTS):
        assert final[str(i)].outputs[0].token_ids == reference(name, tuple(prompt), NUM_NEW)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3", "mixtral", "tied"])
def test_four_ranks_hold_the_same_kv_heads_twice_where_there_are_two(name: str) -> None:
    engine = make_ranked_engine(name, 4)
    try:
        final = run(engine, PROMPTS, NUM_NEW)
    finally:
        engine.close()
    for i, prompt in enumerate(PROMPTS):
        assert final[str(i)].outputs[0].token_ids == reference(name, tuple(prompt), NUM_NEW)


@pytest.mark.slow
def test_each_of_four_ranks_has_a_quarter_of_the_weights_and_of_the_kv() -> None:
    engine = make_ranked_engine("four_kv_heads", 4)
    try:
        check_memory(engine, "four_kv_heads", 4)
    finally:
        engine.close()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=NUM_NEW),
        SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=NUM_NEW),
        BeamSearchParams(beam_width=3, max_tokens=NUM_NEW),
        SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=2, logprobs=1),
        SamplingParams(
            temperature=0,
            max_tokens=NUM_NEW,
            allowed_token_ids=range(9, 40),
            bad_words_token_ids=[[9, 9], [11]],
        ),
    ],
    ids=["greedy", "n=3", "beams", "logprobs", "filters"],
)
def test_each_decoding_mode_gives_what_one_process_gives(engine: LLMEngine, params: object) -> None:
    assert isinstance(params, (SamplingParams, BeamSearchParams))
    alone = make_engine(max_num_seqs=6)
    assert tokens_of(engine, params) == tokens_of(alone, params)
    alone.close()


@pytest.mark.parametrize("seed", range(2))
def test_forced_swaps_change_no_token(engine: LLMEngine, seed: int) -> None:
    rng = random.Random(seed)
    before = sum(engine.stats().preemptions["swap"].values())
    submit(engine, PROMPTS)
    final = {}
    while engine.has_unfinished_requests():
        preempt_at_random(engine, rng, 0.3)
        final.update({output.request_id: output for output in engine.step()})
    assert sum(engine.stats().preemptions["swap"].values()) > before
    for i, prompt in enumerate(PROMPTS):
        expected = reference("llama", tuple(prompt), NUM_NEW)
        assert final[str(i)].outputs[0].token_ids == expected


def test_a_smaller_budget_and_a_sleep_in_the_middle_change_no_token(engine: LLMEngine) -> None:
    submit(engine, PROMPTS)
    final = {}
    for step in range(1000):
        if not engine.has_unfinished_requests():
            break
        if step == 4:
            engine.set_kv_cache_memory(120 * TOKEN_BYTES)
        if step == 7:
            assert engine.sleep() >= 0
            engine.wake_up()
        if step == 9:
            engine.set_kv_cache_memory(2 << 20)
        final.update({output.request_id: output for output in engine.step()})
    for i, prompt in enumerate(PROMPTS):
        expected = reference("llama", tuple(prompt), NUM_NEW)
        assert final[str(i)].outputs[0].token_ids == expected


def test_pins_and_their_end_reach_all_ranks(engine: LLMEngine) -> None:
    run(engine, PROMPTS[:1], 2)
    assert engine.pin_prefix(PROMPTS[0], "someone", ttl_s=1000.0) > 0
    assert engine.pin_prefix(PROMPTS[0], "someone") > 0
    run(engine, PROMPTS[1:2], 2)  # compares the books
    assert engine.unpin_prefix("someone") == 2
    run(engine, PROMPTS[2:3], 2)


def test_a_rank_has_its_part_of_the_weights_and_of_the_kv(engine: LLMEngine) -> None:
    whole = make_model("llama")
    assert engine.manager.spec.num_kv_heads == whole.config.num_key_value_heads // 2
    attention = engine.loaded.model.model.layers[0].self_attn
    assert (
        attention.o_proj.linear.in_features * 2
        == whole.model.layers[0].self_attn.o_proj.in_features
    )
    assert engine.manager.spec.bytes_per_token == TOKEN_BYTES
    check_memory(engine, "llama", 2)


def check_memory(engine: LLMEngine, name: str, num_ranks: int) -> None:
    """What a rank holds is within 5 % of its part: norms and the like are whole on all."""
    whole = make_model(name)
    weights = sum(parameter.nbytes for parameter in whole.parameters())
    config = whole.config
    head_dim = config.hidden_size // config.num_attention_heads
    kv = 256 * 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * 4
    assert engine.ranks is not None
    assert sorted(engine.ranks.weight_bytes) == list(range(num_ranks))
    for of_rank in engine.ranks.weight_bytes.values():
        held = of_rank + 256 * engine.manager.spec.bytes_per_token
        assert held == pytest.approx((weights + kv) / num_ranks, rel=0.05)
