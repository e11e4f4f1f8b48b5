"""n samples of one prompt: computed and held once, sampled as n requests would be."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from itertools import chain
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import transformers as tf

from flexinfer import LLM, LLMEngine, RequestError, RequestOutputKind, SamplingParams
from flexinfer.config import EngineConfig
from helpers.engine_kit import check_nothing_is_left
from helpers.idle_manager import available_bytes
from helpers.tiny_models import make_model, make_tokenizer, random_prompts, reference

CHUNK_BYTES = 4096


def make_llm(**settings: Any) -> LLM:
    defaults = {"max_num_seqs": 8, "kv_cache_memory_bytes": 16 << 20, "chunk_bytes": CHUNK_BYTES}
    model = settings.pop("model", None) or make_model("llama")
    return LLM(model, skip_tokenizer_init=True, **{**defaults, **settings})


@pytest.fixture
def llm() -> Iterator[LLM]:
    with make_llm() as llm:
        yield llm
        check_nothing_is_left(llm.llm_engine)


def generate(llm: LLM, prompts: Any, params: Any) -> Any:
    return llm.generate(prompts, params, use_tqdm=False)


def tokens(output: Any) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_the_prompt_of_eight_samples_is_held_once(enable_prefix_caching: bool) -> None:
    (prompt,) = random_prompts((1024,))
    with make_llm(
        model=long_model(),
        enable_prefix_caching=enable_prefix_caching,
        enable_pre_extend=False,
        chunk_bytes=3 * CHUNK_BYTES,  # the prompt ends inside a chunk
    ) as llm:
        engine, manager = llm.llm_engine, llm.llm_engine.manager
        row_bytes = manager.chunk_bytes * manager.spec.num_planes
        engine.add_request("a", prompt, SamplingParams(n=8, seed=1, max_tokens=9))
        for _ in range(4):
            engine.step()
            manager.check_integrity()
        manager.drain()  # a chunk that the worker cleans is not free
        stats = manager.stats()
        assert stats.num_vtensors == 8
        used_bytes = stats.resident_bytes - stats.free_bytes
        assert used_bytes <= manager.bytes_for(1024) + 7 * row_bytes
        assert stats.saved_bytes == 7 * (manager.bytes_for(1024) - row_bytes)
        assert stats.chunks_copied == 7 * manager.spec.num_planes
        (output,) = engine.abort_request("a")
        assert output.metrics.num_computed_tokens == 1024 + 8 * 3
        check_nothing_is_left(engine)


@cache
def long_model() -> Any:
    """A model with positions for a prompt of 1,024 tokens."""
    torch.manual_seed(0)
    config = copy.deepcopy(make_model("llama").config)
    config.max_position_embeddings = 2048
    return tf.LlamaForCausalLM(config).eval()


def test_greedy_samples_are_all_the_same(llm: LLM) -> None:
    (prompt,) = random_prompts((70,))
    (output,) = generate(llm, [prompt], SamplingParams(n=8, temperature=0, max_tokens=12))
    assert tokens(output) == [reference("llama", tuple(prompt), 12)] * 8
    assert [completion.index for completion in output.outputs] == list(range(8))


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_seeded_samples_are_those_of_requests_with_the_seeds(kind: str) -> None:
    prompts = random_prompts((33, 70, 5))
    with make_llm(model=make_model(kind)) as llm:
        together = generate(llm, prompts, SamplingParams(n=4, seed=7, max_tokens=12))
        again = generate(llm, prompts, SamplingParams(n=4, seed=7, max_tokens=12))
        for prompt, output, repeated in zip(prompts, together, again, strict=True):
            seeds = [SamplingParams(seed=7 + i, max_tokens=12) for i in range(4)]
            alone = generate(llm, [prompt] * 4, seeds)
            assert tokens(output) == [completion.outputs[0].token_ids for completion in alone]
            assert tokens(output) == tokens(repeated)
        assert len({tuple(ids) for ids in tokens(together[0])}) > 1
        check_nothing_is_left(llm.llm_engine)


def test_unseeded_samples_differ(llm: LLM) -> None:
    (output,) = generate(llm, random_prompts((20,)), SamplingParams(n=8, max_tokens=12))
    assert len({tuple(ids) for ids in tokens(output)}) > 1


def test_samples_end_each_at_its_own_token(llm: LLM) -> None:
    (prompt,) = random_prompts((20,))
    free = generate(llm, [prompt], SamplingParams(n=8, seed=0, max_tokens=12))[0]
    # The first sample's first token ends samples at different places, the first one at once.
    stop = free.outputs[0].token_ids[0]
    params = SamplingParams(n=8, seed=0, max_tokens=12, stop_token_ids=[stop])
    (output,) = generate(llm, [prompt], params)
    assert tokens(output)[0] == [stop]
    for cut, whole in zip(tokens(output), tokens(free), strict=True):
        assert cut == (whole[: whole.index(stop) + 1] if stop in whole else whole)
    assert {completion.finish_reason for completion in output.outputs} == {"stop", "length"}


def test_streamed_pieces_of_each_sample_join(llm: LLM) -> None:
    (prompt,) = random_prompts((20,))
    params = SamplingParams(n=3, seed=5, max_tokens=6)
    (whole,) = generate(llm, [prompt], params)
    joined: dict[int, list[int]] = {}
    ends: dict[int, str] = {}
    for output in llm.stream([prompt], params):
        for piece in output.outputs:
            joined.setdefault(piece.index, []).extend(piece.token_ids)
            if piece.finish_reason:
                assert piece.index not in ends
                ends[piece.index] = piece.finish_reason
    assert joined == dict(enumerate(tokens(whole)))
    assert len(ends) == 3


def test_cumulative_outputs_hold_all_samples(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=4, output_kind=RequestOutputKind.CUMULATIVE)
    llm.llm_engine.add_request("a", [1, 2, 3], params)
    lengths = []
    while llm.llm_engine.has_unfinished_requests():
        (output,) = llm.llm_engine.step()
        lengths.append([len(ids) for ids in tokens(output)])
    assert lengths == [[1] * 3, [2] * 3, [3] * 3, [4] * 3]


@pytest.mark.parametrize(("interval", "counts"), [(1, [1] * 10), (4, [1, 4, 4, 1]), (99, [1, 9])])
def test_the_stream_interval_joins_outputs_after_the_first(
    interval: int, counts: list[int]
) -> None:
    params = SamplingParams(n=2, seed=5, max_tokens=10, output_kind=RequestOutputKind.DELTA)
    with make_llm(stream_interval=interval) as llm:
        (whole,) = generate(llm, [[1, 2, 3]], SamplingParams(n=2, seed=5, max_tokens=10))
        llm.llm_engine.add_request("a", [1, 2, 3], params)
        pieces: list[list[list[int]]] = [[], []]
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                for completion in output.outputs:
                    pieces[completion.index].append(completion.token_ids)
    assert [[len(piece) for piece in sample] for sample in pieces] == [counts, counts]
    assert [list(chain.from_iterable(sample)) for sample in pieces] == tokens(whole)


def test_an_interval_by_the_load_loses_nothing_and_shows_the_first_token_at_once() -> None:
    params = SamplingParams(seed=5, max_tokens=40, output_kind=RequestOutputKind.DELTA)
    prompts = [[index + 1, 2, 3] for index in range(12)]
    with make_llm(stream_interval=None) as llm:
        wholes = generate(llm, prompts, SamplingParams(seed=5, max_tokens=40))
        for index, prompt in enumerate(prompts):
            llm.llm_engine.add_request(str(index), prompt, params)
        pieces: dict[str, list[list[int]]] = {}
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                pieces.setdefault(output.request_id, []).append(output.outputs[0].token_ids)
    for index, whole in enumerate(wholes):
        mine = pieces[str(index)]
        assert len(mine[0]) == 1
        assert list(chain.from_iterable(mine)) == tokens(whole)[0]


def test_each_sample_has_its_own_text() -> None:
    tokenizer = make_tokenizer()
    settings: dict[str, Any] = {"kv_cache_memory_bytes": 16 << 20, "tokenizer": tokenizer}
    with LLM(make_model("llama"), **settings) as llm:
        (output,) = generate(llm, [[70, 80]], SamplingParams(n=3, seed=1, max_tokens=8))
        texts = [completion.text for completion in output.outputs]
        whole = [tokenizer.decode(ids, skip_special_tokens=True) for ids in tokens(output)]
        assert texts == whole
        assert len(set(texts)) == 3


# best_of.


def test_best_of_gives_the_most_probable_samples(llm: LLM) -> None:
    (prompt,) = random_prompts((20,))
    params = {"seed": 3, "max_tokens": 6}
    (all_of_them,) = generate(llm, [prompt], SamplingParams(n=6, logprobs=0, **params))
    ranked = sorted(all_of_them.outputs, key=lambda c: -c.cumulative_logprob)
    (best,) = generate(llm, [prompt], SamplingParams(n=2, best_of=6, **params))
    assert tokens(best) == [completion.token_ids for completion in ranked[:2]]
    assert [completion.index for completion in best.outputs] == [0, 1]
    assert all(completion.logprobs is None for completion in best.outputs)


def test_best_of_keeps_logprobs_that_were_asked_for(llm: LLM) -> None:
    params = SamplingParams(n=1, best_of=3, seed=3, max_tokens=6, logprobs=2)
    (output,) = generate(llm, [[1, 2, 3]], params)
    assert len(output.outputs[0].logprobs) == 6


def test_a_sample_that_failed_is_not_among_the_best(llm: LLM) -> None:
    engine = llm.llm_engine
    engine.add_request("a", [1, 2, 3], SamplingParams(n=1, best_of=3, seed=3, max_tokens=6))
    engine.step()
    sample = next(iter(engine.scheduler.running.values()))
    engine.scheduler.abort([sample], "error", "out of memory")
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert outputs[0].outputs[0].finish_reason == "length"


# Memory.


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
@pytest.mark.parametrize("max_num_batched_tokens", [16, 512])
def test_abort_frees_all_samples(num_steps: int, max_num_batched_tokens: int) -> None:
    with make_llm(
        enable_prefix_caching=False, max_num_batched_tokens=max_num_batched_tokens
    ) as llm:
        engine = llm.llm_engine
        before = available_bytes(engine.manager)
        (prompt,) = random_prompts((40,))
        engine.add_request("a", prompt, SamplingParams(n=4, max_tokens=12))
        engine.add_request("b", prompt, SamplingParams(n=8, max_tokens=12))
        for _ in range(num_steps):
            engine.step()
        outputs = engine.abort_request(["a", "b"])
        assert {c.finish_reason for output in outputs for c in output.outputs} == {"abort"}
        assert [len(output.outputs) for output in outputs] == [4, 8]
        assert available_bytes(engine.manager) == before
        check_nothing_is_left(engine)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_samples_that_are_preempted_go_on_where_they_were(enable_prefix_caching: bool) -> None:
    prompts = random_prompts((20, 25))
    params = SamplingParams(n=4, seed=11, max_tokens=24)
    with make_llm() as roomy:
        expected = [tokens(output) for output in generate(roomy, prompts, params)]
    with make_llm(
        kv_cache_memory_bytes=70 * 2048,
        max_model_len=60,
        enable_prefix_caching=enable_prefix_caching,
    ) as llm:
        outputs = generate(llm, prompts, params)
        assert [tokens(output) for output in outputs] == expected
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
        check_nothing_is_left(llm.llm_engine)


def test_a_group_waits_until_it_has_slots_for_all(llm: LLM) -> None:
    engine = llm.llm_engine
    prompts = random_prompts((20, 20))  # unlike ones: the same would wait for its prefix
    params = SamplingParams(n=5, seed=0, max_tokens=3)
    for name, prompt in zip("ab", prompts, strict=True):
        engine.add_request(name, prompt, params)
    most = 0
    final = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            final[output.request_id] = output
        engine.manager.check_integrity()
        most = max(most, engine.manager.stats().num_vtensors)
    assert most == 5
    for name, prompt in zip("ab", prompts, strict=True):
        (alone,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        assert tokens(final[name]) == tokens(alone)


def test_a_failing_step_ends_the_whole_group(llm: LLM) -> None:
    engine = llm.llm_engine
    engine.add_request("a", [1, 2, 3], SamplingParams(n=3, max_tokens=9))
    engine.step()
    forward = engine.runner.backend.forward
    engine.runner.backend.forward = lambda *_: 1 / 0  # type: ignore[assignment,return-value]
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine.runner.backend.forward = forward  # type: ignore[method-assign]
    check_nothing_is_left(engine)


def test_a_prompt_that_finds_no_memory_ends_all_its_samples() -> None:
    with make_llm(kv_cache_memory_bytes=64 << 10, max_model_len=60) as llm:
        engine = llm.llm_engine
        engine.add_request("a", [1] * 30, SamplingParams(n=2, max_tokens=2))
        holder = engine.manager.create()
        holder.extend(50)
        (output,) = engine.step()
        assert [completion.finish_reason for completion in output.outputs] == ["error"] * 2
        assert "KV memory" in str(output.outputs[1].stop_reason)
        holder.release()
        check_nothing_is_left(engine)


# Refusals.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n": 0}, "n must be at least 1, got 0"),
        ({"n": 1.5}, "n must be an integer, got 1.5"),
        ({"n": 4, "best_of": 3}, "best_of must be at least n, got best_of=3, n=4"),
        ({"best_of": True}, "best_of must be an integer, got True"),
        ({"n": 2, "seed": 2**63 - 1}, "seed must be a 64-bit integer"),
        (
            {"n": 1, "best_of": 2, "output_kind": RequestOutputKind.DELTA},
            r"best_of \(2\) larger than n \(1\) has no DELTA output",
        ),
    ],
)
def test_bad_numbers_of_samples_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**settings)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(n=9), "n is 9, but max_num_seqs is 8"),
        (SamplingParams(n=1, best_of=10), "best_of is 10, but max_num_seqs is 8"),
    ],
)
def test_more_samples_than_slots_are_refused(llm: LLM, params: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        generate(llm, [[1, 2, 3]], params)


def test_an_id_that_a_sample_has_is_in_use(llm: LLM) -> None:
    llm.llm_engine.add_request("a", [1, 2, 3], SamplingParams(n=2))
    with pytest.raises(RequestError, match="'a#1' is in use"):
        llm.llm_engine.add_request("a#1", [1, 2, 3])
    llm.llm_engine.abort_request("a")


def test_samples_in_the_dense_layout_share_their_prompt() -> None:
    config = EngineConfig(
        make_model("llama"),
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=16 << 20,
        chunk_bytes=4096,
        layers_per_plane=1,
    )
    engine = LLMEngine.from_engine_args(config)
    engine.add_request("a", [5] * 100, SamplingParams(n=8, temperature=0, max_tokens=9))
    while engine.has_unfinished_requests():
        outputs = engine.step()
        engine.manager.check_integrity()
    assert len({tuple(ids) for ids in tokens(outputs[0])}) == 1
    check_nothing_is_left(engine)
    engine.close()
