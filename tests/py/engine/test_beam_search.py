"""Beam search finds the sequences and scores of transformers' `generate`, over forked vTensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer import (
    LLM,
    BeamSearchParams,
    EngineError,
    RequestError,
    SamplingParams,
)
from helpers.engine_kit import check_nothing_is_left
from helpers.idle_manager import available_bytes
from helpers.tiny_models import (
    VOCAB_SIZE,
    make_model,
    make_tokenizer,
    random_prompts,
    save_chat_model,
)

PAD = VOCAB_SIZE - 1
SOME_EOS = list(range(5, 17))
"""So many end-of-sequence tokens that random models end beams early."""


def make_llm(name: str = "llama", **settings: Any) -> LLM:
    defaults = {"max_num_seqs": 16, "kv_cache_memory_bytes": 16 << 20, "chunk_bytes": 4096}
    return LLM(make_model(name), skip_tokenizer_init=True, **{**defaults, **settings})


@pytest.fixture(scope="module")
def module_llm() -> Iterator[LLM]:
    with make_llm() as llm:
        yield llm


@pytest.fixture
def llm(module_llm: LLM) -> Iterator[LLM]:
    yield module_llm
    check_nothing_is_left(module_llm.llm_engine)


def set_eos(llm: LLM, eos: list[int]) -> None:
    object.__setattr__(llm.llm_engine.loaded, "eos_token_ids", frozenset(eos))


Found = list[tuple[list[int], float]]
"""Generated tokens and score of each sequence, best first."""


def search(llm: LLM, prompts: list[list[int]], params: BeamSearchParams) -> list[Found]:
    outputs = llm.beam_search(prompts, params, use_tqdm=False)
    return [
        [(found.tokens[len(prompt) :], found.score) for found in output.sequences]
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def reference(name: str, prompt: list[int], params: BeamSearchParams, eos: list[int]) -> Found:
    generated = make_model(name).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        do_sample=False,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=eos or None,
        pad_token_id=PAD,
        return_dict_in_generate=True,
        output_scores=True,
    )
    rows = generated.sequences[:, len(prompt) :].tolist()
    return [
        (cut_after_eos(row, eos), score)
        for row, score in zip(rows, generated.sequences_scores.tolist(), strict=True)
    ]


def cut_after_eos(row: list[int], eos: list[int]) -> list[int]:
    ends = [i for i, token_id in enumerate(row) if token_id in eos]
    return row[: ends[0] + 1] if ends else row


def assert_same(found: Found, expected: Found) -> None:
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    assert [score for _, score in found] == pytest.approx([s for _, s in expected], abs=1e-4)


@pytest.mark.parametrize("eos", [[], [5], SOME_EOS])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -0.5, 2.0])
def test_sequences_and_scores_are_those_of_transformers(
    llm: LLM, length_penalty: float, early_stopping: Any, eos: list[int]
) -> None:
    prompts = random_prompts((33, 7, 1))
    set_eos(llm, eos)
    for beam_width in (2, 4):
        params = BeamSearchParams(
            beam_width=beam_width,
            max_tokens=12,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )
        for prompt, found in zip(prompts, search(llm, prompts, params), strict=True):
            assert_same(found, reference("llama", prompt, params, eos))


@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma2", "gpt_neox"])
@pytest.mark.parametrize("layers_per_plane", [None, 1])
def test_other_models_and_layouts_match(name: str, layers_per_plane: int | None) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=20)
    prompts = random_prompts((40, 5))
    with make_llm(name, layers_per_plane=layers_per_plane) as llm:
        set_eos(llm, SOME_EOS)
        for prompt, found in zip(prompts, search(llm, prompts, params), strict=True):
            assert_same(found, reference(name, prompt, params, SOME_EOS))
        check_nothing_is_left(llm.llm_engine)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("settings", [{"kv_cache_memory_bytes": 88 << 10}, {"max_num_seqs": 5}])
def test_beams_that_are_preempted_or_wait_match(
    settings: dict[str, Any], enable_prefix_caching: bool
) -> None:
    """Memory or slots for about one search, three of them and other requests at once."""
    prompts = random_prompts((20, 25, 9))
    params = BeamSearchParams(beam_width=4, max_tokens=24)
    with make_llm(max_model_len=60, enable_prefix_caching=enable_prefix_caching, **settings) as llm:
        engine = llm.llm_engine
        for i, prompt in enumerate(prompts):
            engine.add_request(f"other {i}", prompt, SamplingParams(temperature=0, max_tokens=20))
        for prompt, found in zip(prompts, search(llm, prompts, params), strict=True):
            assert_same(found, reference("llama", prompt, params, []))
        while engine.has_unfinished_requests():
            engine.step()
        check_nothing_is_left(engine)


def test_random_preemption_of_single_beams_matches() -> None:
    prompts = random_prompts((20, 25))
    params = BeamSearchParams(beam_width=4, max_tokens=20)
    generator = torch.Generator().manual_seed(0)
    with make_llm() as llm:
        scheduler = llm.llm_engine.scheduler
        schedule = scheduler.schedule
        num_preempted = 0

        def disturbed() -> Any:
            nonlocal num_preempted
            if scheduler.running and torch.rand(1, generator=generator).item() < 0.3:
                scheduler.preempt(scheduler.choose_victim(), "test")
                num_preempted += 1
            return schedule()

        scheduler.schedule = disturbed  # type: ignore[method-assign]
        for prompt, found in zip(prompts, search(llm, prompts, params), strict=True):
            assert_same(found, reference("llama", prompt, params, []))
        assert num_preempted > 3
        check_nothing_is_left(llm.llm_engine)


def test_one_beam_is_greedy_decoding(llm: LLM) -> None:
    set_eos(llm, [])
    prompts = random_prompts((33, 7))
    found = search(llm, prompts, BeamSearchParams(beam_width=1, max_tokens=12))
    greedy = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    assert [ids for ((ids, _),) in found] == [output.outputs[0].token_ids for output in greedy]


def test_ignore_eos_goes_on_to_max_tokens(llm: LLM) -> None:
    set_eos(llm, SOME_EOS)
    (prompt,) = random_prompts((20,))
    params = BeamSearchParams(beam_width=3, max_tokens=9, ignore_eos=True)
    (found,) = search(llm, [prompt], params)
    assert_same(found, reference("llama", prompt, params, []))
    assert {len(ids) for ids, _ in found} == {9}


def test_sequences_tell_their_ends_and_probabilities(llm: LLM) -> None:
    set_eos(llm, SOME_EOS)
    (prompt,) = random_prompts((20,))
    params = BeamSearchParams(beam_width=4, max_tokens=5, length_penalty=2.0)
    (output,) = llm.beam_search([prompt], params, use_tqdm=False)
    for found in output.sequences:
        new = found.tokens[len(prompt) :]
        assert found.tokens[: len(prompt)] == prompt
        assert found.finish_reason == ("stop" if new[-1] in SOME_EOS else "length")
        assert found.score == pytest.approx(found.cum_logprob / len(new) ** 2)
        assert [list(entry) for entry in found.logprobs] == [[token_id] for token_id in new]
        chosen = sum(entry[t].logprob for t, entry in zip(new, found.logprobs, strict=True))
        assert found.cum_logprob == pytest.approx(chosen)


def test_max_model_len_bounds_the_search(llm: LLM) -> None:
    set_eos(llm, [])
    (found,) = search(llm, [[5] * 250], BeamSearchParams(beam_width=2, max_tokens=100))
    assert [len(ids) for ids, _ in found] == [6, 6]


def test_more_beams_than_the_vocabulary_offers_at_first(llm: LLM) -> None:
    set_eos(llm, [])
    (prompt,) = random_prompts((9,))
    params = BeamSearchParams(beam_width=16, max_tokens=6)
    (found,) = search(llm, [prompt], params)
    assert_same(found, reference("llama", prompt, params, []))


def test_text_is_that_of_all_tokens(tmp_path: Any) -> None:
    with LLM(save_chat_model(tmp_path), kv_cache_memory_bytes=16 << 20) as llm:
        params = BeamSearchParams(beam_width=2, max_tokens=5)
        (output,) = llm.beam_search("hello", params, use_tqdm=False)
        for found in output.sequences:
            assert found.text == make_tokenizer().decode(found.tokens)
        check_nothing_is_left(llm.llm_engine)


# Memory.


def test_beams_share_all_that_they_have_in_common() -> None:
    """Physical rows: one for each whole row of distinct past, and at most a tail row a beam."""
    with make_llm(
        enable_pre_extend=False, enable_prefix_caching=False, enable_deferred_reclamation=False
    ) as llm:
        engine, manager = llm.llm_engine, llm.llm_engine.manager
        tokens_per_row = 4
        assert manager.bytes_for(tokens_per_row) == manager.bytes_for(1) == 4096
        (prompt,) = random_prompts((201,))
        engine.add_request("a", prompt, BeamSearchParams(beam_width=4, max_tokens=40))
        for _ in range(30):
            engine.step()
            manager.check_integrity()
            beams = [request.token_ids for request in engine.scheduler.running.values()]
            whole_rows = {
                tuple(ids[:end]) for ids in beams for end in range(4, len(ids), tokens_per_row)
            }
            manager.drain()  # a chunk that the worker cleans is not free
            stats = manager.stats()
            assert stats.num_vtensors == len(beams) == 4
            used_rows = (stats.resident_bytes - stats.free_bytes) // 4096
            assert used_rows <= len(whole_rows) + 4
        engine.abort_request("a")
        check_nothing_is_left(engine)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 9])
def test_abort_frees_all_beams(num_steps: int) -> None:
    with make_llm(enable_prefix_caching=False, max_num_batched_tokens=16) as llm:
        engine = llm.llm_engine
        before = available_bytes(engine.manager)
        for i, prompt in enumerate(random_prompts((40, 9))):
            engine.add_request(str(i), prompt, BeamSearchParams(beam_width=4, max_tokens=20))
        for _ in range(num_steps):
            engine.step()
        outputs = engine.abort_request(["0", "1"])
        assert [output.outputs[0].finish_reason for output in outputs] == ["abort"] * 2
        assert available_bytes(engine.manager) == before
        check_nothing_is_left(engine)


def test_a_failing_step_ends_the_search(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.llm_engine.runner.backend, "forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.beam_search([[1, 2, 3]], BeamSearchParams(beam_width=2), use_tqdm=False)


def test_a_search_that_finds_no_memory_says_so() -> None:
    with make_llm(kv_cache_memory_bytes=64 << 10, max_model_len=60) as llm:
        holder = llm.llm_engine.manager.create()
        holder.extend(50)
        with pytest.raises(EngineError, match="KV memory for 30 tokens"):
            llm.beam_search([[1] * 30], BeamSearchParams(beam_width=2), use_tqdm=False)
        holder.release()
        check_nothing_is_left(llm.llm_engine)


def test_progress_is_shown(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.beam_search([[1], [2]], BeamSearchParams(beam_width=2, max_tokens=2))
    assert "2/2" in capsys.readouterr().err


# Refusals.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beam_width": 0}, "beam_width must be at least 1, got 0"),
        ({"beam_width": "4"}, "beam_width must be an integer, got '4'"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"beam_width": 2, "temperature": 0.5}, "temperature must be 0 with beam search"),
        ({"beam_width": 2, "length_penalty": "x"}, "length_penalty must be a finite number"),
        ({"beam_width": 2, "early_stopping": "maybe"}, "must be True, False or 'never'"),
    ],
)
def test_bad_params_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BeamSearchParams(**settings)


@pytest.mark.parametrize("unknown", ["n", "best_of", "top_p"])
def test_params_of_sampling_do_not_go_with_beam_search(unknown: str) -> None:
    with pytest.raises(TypeError, match=unknown):
        BeamSearchParams(beam_width=2, **{unknown: 1})


def test_sampling_params_are_refused_for_beams(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"takes BeamSearchParams, got SamplingParams.*n, best"):
        llm.beam_search([[1]], SamplingParams(n=4))  # type: ignore[arg-type]


def test_beam_search_params_are_refused_for_samples(llm: LLM) -> None:
    with pytest.raises(RequestError, match="sampling_params must be SamplingParams"):
        llm.generate([[1]], BeamSearchParams(beam_width=2))  # type: ignore[arg-type]


def test_more_beams_than_slots_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="beam_width is 17, but max_num_seqs is 16"):
        llm.beam_search([[1]], BeamSearchParams(beam_width=17))
