"""LLM called as programs for vLLM call it, and in ways that it refuses; streams that others end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flexinfer import LLM, EngineError, LLMEngine, ReleasedError, RequestError, SamplingParams
from flexinfer.sampling.params import NO_TOKEN_LEFT

GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.mark.parametrize("end", ["abort", "close"])
def test_a_stream_ends_whose_requests_another_has_ended(model_path: str, end: str) -> None:
    """It stepped an engine without requests for ever."""
    with LLM(model_path, max_num_seqs=2) as own:
        stream = own.stream(["hello", "world"], SamplingParams(max_tokens=30, ignore_eos=True))
        first = next(stream).request_id
        if end == "close":
            own.close()
            with pytest.raises(ReleasedError, match="closed before its requests had ended"):
                list(stream)
        else:
            own.llm_engine.abort_request(first)
            ended: list[str] = []
            with pytest.raises(EngineError, match="1 of 2 requests were ended by another call"):
                ended.extend(output.request_id for output in stream if output.finished)
            assert ended == ["1"]


def test_prompts_may_come_of_a_generator_and_content_in_parts(llm: LLM) -> None:
    texts = ["hello", "world"]
    expected = [output.outputs[0].text for output in llm.generate(texts, GREEDY)]
    made = llm.generate((text for text in texts), GREEDY)  # type: ignore[arg-type]
    assert [output.outputs[0].text for output in made] == expected
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    tokens = [
        llm.chat([{"role": "user", "content": content}], GREEDY)[0].prompt_token_ids
        for content in (parts, "a\nb")
    ]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "a conversation is a list of messages"),
        ({"role": "user", "content": "a"}, "a conversation is a list of messages"),
        (None, "a conversation is a list of messages"),
        ([["hello"]], "a message is a dict"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "can be text alone"),
        ([None], "a conversation is a list of messages, got None"),
        ([[]], "a conversation is empty"),
        ([{"content": "a"}], "the role of a message must be a string, got None"),
        ([{"role": "user", "content": 3}], "the content of a message must be text"),
        ([{"role": "user"}], "the content of a message must be text"),
    ],
)
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.chat(messages, GREEDY)
    with pytest.raises(RequestError, match="prompts must be one or several"):
        llm.generate(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "prompt",
    [
        [np.int64(5), np.int64(6)],
        [torch.tensor(5), torch.tensor(6)],
        {"prompt_token_ids": np.array([5, 6])},
        {"prompt_token_ids": [np.int32(5), 6]},
        torch.tensor([[5, 6]]),
    ],
)
def test_token_ids_may_be_numbers_of_numpy_or_torch(llm: LLM, prompt: Any) -> None:
    (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == [5, 6]
    assert {type(token_id) for token_id in output.prompt_token_ids} == {int}


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (np.array(5), "a prompt must be text or token ids"),
        (np.array([5.0, 6.0]), "each token id of a prompt must be an integer, got 5.0"),
        (np.array([True]), "each token id of a prompt must be an integer, got True"),
        (["a", 5], "a prompt must be text or token ids, got 5"),
        ({1: 2, "a": 3}, "got the keys"),
        ({"prompt": 3, "prompt_token_ids": [3]}, "text of a prompt must be a string, got 3"),
        ("a\ud800b", r"half a surrogate pair \('\\ud800'\) at character 1"),
        (
            {"prompt": "a", "multi_modal_data": {"image": 1}},
            "'multi_modal_data' of a prompt",
        ),
        ({"prompt_embeds": torch.zeros(2, 8)}, "'prompt_embeds' of a prompt is not supported"),
    ],
)
def test_what_is_no_prompt_is_refused(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt, GREEDY, use_tqdm=False)


def test_a_template_is_given_what_the_caller_has_for_it(llm: LLM) -> None:
    """As vLLM does, for templates that think unless told otherwise."""
    template = "{{ 'thinks' if enable_thinking else 'does not' }}"
    chat = [{"role": "user", "content": "a"}]
    for thinks, text in ((True, "thinks"), (False, "does not")):
        (output,) = llm.chat(
            chat,
            GREEDY,
            use_tqdm=False,
            chat_template=template,
            chat_template_kwargs={"enable_thinking": thinks},
        )
        assert llm.get_tokenizer().decode(output.prompt_token_ids) == text


def test_a_chat_shows_what_the_template_made_of_it(llm: LLM) -> None:
    """Parts where it takes them, arguments as values: as the server."""
    template = (
        "{% for m in messages %}{{ '<' ~ m.role ~ '>' }}"
        "{% for p in m['content'] %}{{ p['text'] }}{% endfor %}"
        "{% for c in m.tool_calls or () %}{{ c.function.arguments | tojson }}{% endfor %}"
        "{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    chat: list[dict[str, object]] = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    (output,) = llm.chat(chat, GREEDY, use_tqdm=False, chat_template=template)
    assert output.prompt == '<user>hello<assistant>{"x": 1}'
    assert call["function"] == {"name": "f", "arguments": '{"x": 1}'}
    (output,) = llm.chat(
        chat[:1],
        GREEDY,
        use_tqdm=False,
        chat_template="{{ messages[0].content }}",
        chat_template_content_format="openai",
    )
    assert output.prompt == "[{'type': 'text', 'text': 'hello'}]"


def test_a_conversation_reaches_a_template_of_parts(model_path: str) -> None:
    template = (
        "{% for m in messages %}{% for p in m['content'] %}{{ p['text'] }} {% endfor %}{% endfor %}"
    )
    with (
        LLM(model_path, chat_template=template, kv_cache_memory_bytes="8MiB") as own,
        own.conversation() as talk,
    ):
        output = talk.say("hello", GREEDY)
        assert own.get_tokenizer().decode(output.prompt_token_ids).strip() == "hello"


def test_bad_words_are_texts_that_a_tokenizer_reads() -> None:
    with pytest.raises(ValueError, match="bad_words has half a surrogate pair"):
        SamplingParams(bad_words=["a\ud800"])


def test_empty_data_of_other_kinds_is_none(llm: LLM) -> None:
    prompt: Any = {"prompt": "hello", "multi_modal_data": {}, "mm_processor_kwargs": None}
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"chat_template": "{% if"}, "the chat template cannot render"),
        ({"chat_template": "{{ raise_exception('no') }}"}, "cannot render .*: no"),
        ({"chat_template": 3}, "the chat template cannot render"),
        ({"tools": 3}, "the chat template cannot render"),
        ({"chat_template": "{{ '\ud800' }}"}, "a text has half a surrogate pair"),
        ({"chat_template_content_format": "parts"}, "must be one of 'auto', 'string', 'openai'"),
        ({"chat_template_kwargs": {"tokenize": True}}, "for the template, and may not set 'tokeni"),
        ({"chat_template_kwargs": ["a"]}, "chat_template_kwargs must be a dict"),
        ({"continue_final_message": True}, "the chat template cannot render"),
    ],
)
def test_a_template_that_fails_is_a_request_refused(
    llm: LLM, wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        llm.chat([{"role": "user", "content": "a"}], GREEDY, use_tqdm=False, **wrong)


def test_priorities_are_whole_numbers_one_for_each_prompt(llm: LLM) -> None:
    (output,) = llm.generate("a", GREEDY, priority=[np.int64(1)], use_tqdm=False)
    assert output.finished
    assert len(llm.generate(["a", "b"], GREEDY, priority=3, use_tqdm=False)) == 2
    wrong: Any
    for wrong in (2.5, "1"):
        with pytest.raises(RequestError, match="priority must be a number, or a list"):
            llm.generate("a", GREEDY, priority=wrong)
    with pytest.raises(RequestError, match="2 prompts but 1 priorities"):
        llm.generate(["a", "b"], GREEDY, priority=[1])


def test_a_bar_is_made_by_whom_the_caller_names(llm: LLM) -> None:
    made: list[int] = []

    def bar(outputs: Any, *, total: int, desc: str) -> Any:
        made.append(total)
        return outputs

    llm.generate(["a", "b"], GREEDY, use_tqdm=bar)
    assert made == [2]


def test_an_engine_may_be_given_the_template_of_all_its_chats(
    model_path: str, tmp_path: Path
) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages[0].content }} hello")
    for template in (file, str(file), file.read_text()):
        with LLM(model_path, chat_template=template, kv_cache_memory_bytes="8MiB") as own:
            chat = [{"role": "user", "content": "world"}]
            (output,) = own.chat(chat, GREEDY, use_tqdm=False)
            assert own.get_tokenizer().decode(output.prompt_token_ids) == "world hello"
            with own.conversation() as talk:
                assert talk.say("world", GREEDY).prompt_token_ids == output.prompt_token_ids
    with pytest.raises(ValueError, match="the chat template '/no/such': there is no such file"):
        LLM(model_path, chat_template="/no/such")


def test_a_template_changes_no_tokenizer_of_the_caller(llm: LLM, model_path: str) -> None:
    tokenizer = llm.get_tokenizer()
    before = tokenizer.chat_template
    settings: Any = {"tokenizer": tokenizer, "kv_cache_memory_bytes": "8MiB"}
    with LLM(model_path, chat_template="{{ messages[0].content }}", **settings) as own:
        assert own.get_tokenizer().chat_template == "{{ messages[0].content }}"
    assert tokenizer.chat_template == before


def test_an_engine_without_a_tokenizer_to_have_a_template_is_closed(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[LLMEngine] = []
    close = LLMEngine.close
    monkeypatch.setattr(LLMEngine, "close", lambda self: closed.append(self) or close(self))
    settings: Any = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": "8MiB"}
    with pytest.raises(RequestError, match="chat_template"):
        LLM(model_path, chat_template="{{ messages }}", **settings)
    assert len(closed) == 1


def test_a_conversation_takes_messages_and_texts_alone(llm: LLM) -> None:
    wrong: Any = 3
    with pytest.raises(RequestError, match="starts from messages or tokens, got 3"):
        llm.conversation(wrong)
    with llm.conversation() as chat, pytest.raises(RequestError, match="must be text, got 3"):
        chat.say(wrong)


def test_a_request_that_ends_with_an_error_says_so_and_is_warned_of(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    """An empty text was all that there was to see."""
    impossible = SamplingParams(allowed_token_ids=[5], bad_words_token_ids=[[5]])
    outputs = llm.generate(["a", "b", "c"], [GREEDY, impossible, impossible], use_tqdm=False)
    ended = [(output.outputs[0].finish_reason, output.outputs[0].stop_reason) for output in outputs]
    assert ended == [("length", None), ("error", NO_TOKEN_LEFT), ("error", NO_TOKEN_LEFT)]
    told = [record.getMessage() for record in caplog.records if record.name == "flexinfer.llm"]
    assert len(told) == 1
    assert told[0].startswith("2 completions have ended with an error")
    assert NO_TOKEN_LEFT in told[0]
