"""The offline API: prompts, chat, streaming, stops, log probabilities, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer import LLM, RequestError, SamplingParams
from helpers.tiny_models import (
    make_model,
    make_tokenizer,
    random_prompts,
    reference,
    save_chat_model,
)

GREEDY = SamplingParams(temperature=0, max_tokens=12)


def one(llm: LLM, prompt: Any, params: SamplingParams = GREEDY) -> Any:
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return output


def test_all_forms_of_a_prompt_mean_the_same(llm: LLM) -> None:
    ids = make_tokenizer()("hello").input_ids
    forms = ["hello", ids, {"prompt": "hello"}, {"prompt_token_ids": ids}]
    outputs = llm.generate(forms, GREEDY, use_tqdm=False)
    assert all(output.prompt_token_ids == ids for output in outputs)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert [output.prompt for output in outputs] == ["hello", None, "hello", None]


@pytest.mark.parametrize("prompt", ["hello", [5, 6], {"prompt": "x"}, torch.tensor([5, 6])])
def test_one_prompt_needs_no_list(llm: LLM, prompt: Any) -> None:
    assert len(llm.generate(prompt, GREEDY, use_tqdm=False)) == 1


def test_text_is_that_of_the_tokens(llm: LLM) -> None:
    output = one(llm, "hello").outputs[0]
    tokenizer = make_tokenizer()
    whole = tokenizer.decode(tokenizer("hello").input_ids + output.token_ids)
    assert "hello" + output.text == whole or "\ufffd" in whole
    assert (output.index, output.finish_reason, output.stop_reason) == (0, "length", None)


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["a", "bb", "ccc", "dddd"]
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (9, 1, 5, 2)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 1, 5, 2]


def test_stream_pieces_join_to_what_generate_gives(llm: LLM) -> None:
    whole = one(llm, "hello world")
    pieces = list(llm.stream("hello world", GREEDY))
    assert "".join(p.outputs[0].text for p in pieces) == whole.outputs[0].text
    assert [t for p in pieces for t in p.outputs[0].token_ids] == whole.outputs[0].token_ids
    assert [p.finished for p in pieces] == [False] * 11 + [True]


def test_stream_of_many_prompts_interleaves_them(llm: LLM) -> None:
    ids = [output.request_id for output in llm.stream(["a", "b"], GREEDY)]
    assert ids[0] != ids[1]
    assert ids[::2] == [ids[0]] * 12


def test_leaving_a_stream_early_aborts_it(llm: LLM) -> None:
    stream = llm.stream(["a", "b"], GREEDY)
    next(stream)
    stream.close()
    assert not llm.llm_engine.has_unfinished_requests()


def test_generate_during_a_stream_disturbs_neither(llm: LLM) -> None:
    expected = one(llm, "hello").outputs[0].token_ids
    stream = llm.stream("hello", GREEDY)
    tokens = list(next(stream).outputs[0].token_ids)
    assert one(llm, "hello").outputs[0].token_ids == expected
    tokens += [t for output in stream for t in output.outputs[0].token_ids]
    assert tokens == expected


def test_later_turns_reuse_the_earlier_ones(llm: LLM) -> None:
    llm.reset_prefix_cache()
    first = one(llm, [9, 8, 7, 6, 5])
    history = [9, 8, 7, 6, 5, *first.outputs[0].token_ids]
    second = one(llm, [*history, 11, 12])
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == len(history) - 1
    assert second.metrics.num_computed_tokens == 3 + 11


def test_chat_applies_the_template(llm: LLM) -> None:
    (output,) = llm.chat([{"role": "user", "content": "hello"}], GREEDY, use_tqdm=False)
    text = "<s>user: hello</s><s>assistant: "
    assert make_tokenizer().decode(output.prompt_token_ids) == text


def test_chat_takes_many_conversations(llm: LLM) -> None:
    conversations = [[{"role": "user", "content": text}] for text in ("a", "b", "c")]
    assert len(llm.chat(conversations, GREEDY, use_tqdm=False)) == 3


def test_metrics_tell_when_the_first_token_came(llm: LLM) -> None:
    metrics = one(llm, "hello").metrics
    times = (
        metrics.arrival_time,
        metrics.first_scheduled_time,
        metrics.first_token_time,
        metrics.finished_time,
    )
    assert list(times) == sorted(times)
    assert metrics.time_to_first_token_s > 0


# Ending.


def test_eos_ends_a_request_and_has_no_text(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, logit_bias={1: 100.0})
    output = one(llm, "hello", params).outputs[0]
    assert (output.token_ids, output.text) == ([1], "")
    assert (output.finish_reason, output.stop_reason) == ("stop", None)


def test_ignore_eos_goes_on(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, logit_bias={1: 100.0}, ignore_eos=True)
    assert one(llm, "hello", params).outputs[0].token_ids == [1] * 5


def test_min_tokens_puts_the_end_off(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=9, logit_bias={1: 100.0}, min_tokens=4)
    tokens = one(llm, "hello", params).outputs[0].token_ids
    assert len(tokens) == 5
    assert tokens.index(1) == 4


def test_stop_token_ends_a_request_and_is_named(llm: LLM) -> None:
    free = one(llm, "hello").outputs[0]
    stop = free.token_ids[3]
    first = free.token_ids.index(stop)
    params = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[stop])
    output = one(llm, "hello", params).outputs[0]
    assert output.token_ids == free.token_ids[: first + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_cuts_the_text(llm: LLM, include: bool) -> None:
    bias = {make_tokenizer().convert_tokens_to_ids(c): 100.0 for c in "xyz"}
    params = SamplingParams(
        temperature=1.0,
        seed=3,
        max_tokens=60,
        logit_bias=bias,
        stop=["xyz", "zzz"],
        include_stop_str_in_output=include,
    )
    pieces = list(llm.stream("hello", params))
    text = "".join(piece.outputs[0].text for piece in pieces)
    last = pieces[-1].outputs[0]
    assert last.finish_reason == "stop"
    assert last.stop_reason in ("xyz", "zzz")
    assert text.endswith(str(last.stop_reason)) is include
    assert text == one(llm, "hello", params).outputs[0].text


def test_max_tokens_none_goes_to_max_model_len(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    output = one(llm, [5] * 250, params)
    assert len(output.outputs[0].token_ids) == llm.llm_engine.max_model_len - 250
    assert output.outputs[0].finish_reason == "length"


# Sampling.


def test_a_seed_gives_the_same_tokens_in_any_company(llm: LLM) -> None:
    params = SamplingParams(seed=5, max_tokens=12)
    alone = one(llm, "hello", params).outputs[0].token_ids
    crowd = llm.generate(["x", "hello", "y"], SamplingParams(seed=5, max_tokens=12), use_tqdm=False)
    assert crowd[1].outputs[0].token_ids == alone


def test_logprobs_hold_the_chosen_token_and_the_best(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=6, logprobs=2)
    output = one(llm, "hello", params).outputs[0]
    assert output.logprobs is not None
    assert len(output.logprobs) == 6
    for token, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert token in entry
        assert {1, 2} <= {logprob.rank for logprob in entry.values()}
        assert all(logprob.decoded_token is not None for logprob in entry.values())
    chosen = sum(e[t].logprob for t, e in zip(output.token_ids, output.logprobs, strict=True))
    assert output.cumulative_logprob == pytest.approx(chosen)


def test_without_logprobs_there_are_none(llm: LLM) -> None:
    output = one(llm, "hello").outputs[0]
    assert output.logprobs is None
    assert output.cumulative_logprob is None


# Refusals: before any work, with a clear message, and nothing left behind.


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([[]], "the prompt is empty"),
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ([5] * 256, "256 tokens, but max_model_len is 256"),
        ([5, 9999], r"token id 9999 is not in \[0, 270\)"),
        ([5, -1], "token id -1"),
        ([5, 1.5], "must be an integer, got 1.5"),
        ({"text": "x"}, "'prompt' or 'prompt_token_ids'"),
        ({"prompt": 3}, "must be a string, got 3"),
        ({"prompt": "x", "cache_salt": 3}, "cache_salt must be a string"),
        ([None], "must be text or token ids, got None"),
    ],
)
def test_bad_prompt_is_refused(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt, GREEDY, use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()


def test_one_bad_prompt_refuses_all(llm: LLM) -> None:
    with pytest.raises(RequestError):
        llm.generate(["good", ""], GREEDY, use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()


def test_numbers_of_prompts_and_params_must_agree(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 prompts but 1 sampling_params"):
        llm.generate(["a", "b"], [GREEDY], use_tqdm=False)


def test_chat_without_template_is_refused(tmp_path: Path) -> None:
    with (
        LLM(save_chat_model(tmp_path, chat_template=None), kv_cache_memory_bytes=16 << 20) as llm,
        pytest.raises(RequestError, match="no chat template"),
    ):
        llm.chat([{"role": "user", "content": "hello"}])


def test_empty_conversation_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="empty"):
        llm.chat([])


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"trust_remote_code": "yes"}, ValueError, "trust_remote_code must be True or False"),
        ({"hf_config_path": "a"}, ValueError, "hf_config_path='a' is not served here"),
        ({"bogus": 1}, TypeError, "there is no argument 'bogus' here"),
        ({"dtype": "int8"}, ValueError, "dtype must be one of auto, float32"),
        ({"max_model_len": 1000}, ValueError, "1000, but the model has 256 positions"),
        ({"max_model_len": 0}, ValueError, "max_model_len must be a positive integer, got 0"),
        ({"max_num_seqs": -1}, ValueError, "max_num_seqs must be a positive integer, got -1"),
        ({"kv_cache_memory_bytes": 100}, ValueError, "100"),
        ({"attention_backend": "magic"}, ValueError, "got 'magic'"),
        ({"chunk_bytes": 5000}, ValueError, "5000"),
        ({"seed": "x"}, ValueError, "seed must be an integer"),
    ],
)
def test_bad_setting_is_refused(
    model_path: str, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM(model_path, **{"kv_cache_memory_bytes": 16 << 20, **settings})


def test_what_programs_for_vllm_pass_is_taken(
    model_path: str, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(
        model_path,
        trust_remote_code=True,
        seed=None,
        max_model_len="auto",
        block_size=16,
        disable_log_stats=False,
        kv_cache_memory_bytes="16MiB",
    ) as llm:
        assert llm.llm_engine.max_model_len == 256
    assert "no code of a model's repository is run here" in caplog.text


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"chunk_bytes": 1000}, "granularity"),
        ({"chunk_bytes": "64KiB", "kv_cache_memory_bytes": "32KiB"}, "less than one chunk"),
        ({"swap_space": 4}, "swap_space 4 holds the KV of no request: it is in bytes"),
    ],
)
def test_sizes_that_no_model_can_have_are_refused_before_the_weights_are_read(
    sizes: dict[str, Any], says: str, model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "flexinfer.models.loading.load_model", lambda *_: pytest.fail("weights were read")
    )
    with pytest.raises(ValueError, match=says):
        LLM(model=model_path, **sizes)


def test_a_budget_that_holds_less_than_max_model_len_is_refused_with_the_numbers(
    model_path: str,
) -> None:
    with pytest.raises(
        ValueError, match=r"budget of 131072 bytes holds .* tokens; 200 tokens need"
    ):
        LLM(model_path, kv_cache_memory_bytes=128 << 10, chunk_bytes=4096, max_model_len=200)


def test_without_max_model_len_the_budget_sets_it(model_path: str) -> None:
    with LLM(model_path, kv_cache_memory_bytes=128 << 10, chunk_bytes=4096) as llm:
        assert 2 <= llm.llm_engine.max_model_len < 256


def test_without_tokenizer_prompts_are_token_ids() -> None:
    (prompt,) = random_prompts((9,))
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 16 << 20}
    with LLM(make_model("llama"), **settings) as llm:
        output = one(llm, prompt).outputs[0]
        assert output.token_ids == reference("llama", tuple(prompt), 12)
        assert output.text == ""
        with pytest.raises(RequestError, match="needs a tokenizer"):
            llm.generate("text", GREEDY, use_tqdm=False)
        with pytest.raises(RequestError, match="stop strings need a tokenizer"):
            llm.generate([prompt], SamplingParams(stop="x"), use_tqdm=False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", torch.bfloat16])
def test_half_precision_runs(model_path: str, dtype: Any) -> None:
    with LLM(model_path, dtype=dtype, kv_cache_memory_bytes=16 << 20) as llm:
        outputs = llm.generate(["hello", "a longer prompt"] * 3, GREEDY, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == 12 for output in outputs)
        assert str(llm.llm_engine.manager.spec.dtype) in str(dtype)


@pytest.mark.parametrize(
    "settings", [{"max_model_len": 1000}, {"attention_backend": "magic"}, {"tokenizer": "/none"}]
)
def test_bad_setting_is_refused_before_weights_are_read(
    model_path: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "flexinfer.models.loading._load_weights", lambda *_: pytest.fail("weights read")
    )
    with pytest.raises(ValueError, match=r"1000|magic|tokenizer folder"):
        LLM(model_path, **settings)


def test_a_loaded_tokenizer_may_be_given() -> None:
    settings: dict[str, Any] = {"kv_cache_memory_bytes": 16 << 20}
    with LLM(make_model("llama"), tokenizer=make_tokenizer(), **settings) as llm:
        assert llm.get_tokenizer() is make_tokenizer()
