"""The real `openai` client: what it asks is answered as the offline engine answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from flexinfer import LLM, BeamSearchParams, SamplingParams
from helpers.serving import MODEL, ServerProcess

HELLO: Any = [{"role": "user", "content": "Hello"}]
PROMPT = "The cat sat on"


def chat_text(llm: LLM, messages: Any, **params: Any) -> str:
    (output,) = llm.chat(messages, SamplingParams(**params), use_tqdm=False)
    return output.outputs[0].text


def test_chat_says_what_the_offline_engine_says(client: openai.OpenAI, offline: LLM) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, temperature=0, max_completion_tokens=30
    )
    choice = answer.choices[0]
    assert choice.message.content == chat_text(offline, HELLO, temperature=0, max_tokens=30)
    assert choice.finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-")


def test_chat_without_a_length_runs_to_its_end(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0)
    assert answer.choices[0].finish_reason == "stop"


def test_a_stream_joins_to_the_whole_answer(client: openai.OpenAI, offline: LLM) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            temperature=0,
            max_completion_tokens=30,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == chat_text(offline, HELLO, temperature=0, max_tokens=30)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    usage = chunks[-1].usage
    assert usage is not None
    assert not chunks[-1].choices
    assert usage.completion_tokens == usage.total_tokens - usage.prompt_tokens > 0


def test_seeded_samples_are_those_of_the_offline_engine(
    client: openai.OpenAI, offline: LLM
) -> None:
    params = {"temperature": 1.0, "seed": 7, "n": 3, "max_tokens": 12}
    answer = client.completions.create(model=MODEL, prompt=PROMPT, **params)  # type: ignore[call-overload]
    (output,) = offline.generate(PROMPT, SamplingParams(**params), use_tqdm=False)  # type: ignore[arg-type]
    assert [c.text for c in answer.choices] == [one.text for one in output.outputs]
    assert [c.index for c in answer.choices] == [0, 1, 2]


def test_streamed_samples_stay_apart(client: openai.OpenAI, offline: LLM) -> None:
    params = {"temperature": 1.0, "seed": 3, "n": 3, "max_tokens": 10}
    texts = ["", "", ""]
    for chunk in client.completions.create(  # type: ignore[call-overload]
        model=MODEL, prompt=PROMPT, stream=True, **params
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    (output,) = offline.generate(PROMPT, SamplingParams(**params), use_tqdm=False)  # type: ignore[arg-type]
    assert texts == [one.text for one in output.outputs]


@pytest.mark.parametrize("stream", [False, True])
def test_many_prompts_are_answered_in_order(
    client: openai.OpenAI, offline: LLM, stream: bool
) -> None:
    prompts = [PROMPT, "One two three", "Hello"]
    got: Any = client.completions.create(
        model=MODEL, prompt=prompts, temperature=0, max_tokens=8, stream=stream
    )
    texts = ["", "", ""]
    for answer in got if stream else [got]:
        for choice in answer.choices:
            texts[choice.index] += choice.text
    outputs = offline.generate(prompts, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert texts == [output.outputs[0].text for output in outputs]


def test_token_ids_are_a_prompt(client: openai.OpenAI, offline: LLM) -> None:
    ids = offline.get_tokenizer()(PROMPT).input_ids
    by_ids = client.completions.create(model=MODEL, prompt=ids, temperature=0, max_tokens=8)
    by_text = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=8)
    assert by_ids.choices[0].text == by_text.choices[0].text


def test_echo_shows_the_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, temperature=0, max_tokens=4, echo=True
    )
    assert answer.choices[0].text.startswith(PROMPT)
    assert len(answer.choices[0].text) > len(PROMPT)


def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI, offline: LLM) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=0, echo=True, logprobs=1
    )
    choice = answer.choices[0]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (output,) = offline.generate(PROMPT, params, use_tqdm=False)
    scored = zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True)
    assert choice.text == PROMPT
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(
        [entry[token].logprob for token, entry in scored if entry], abs=1e-4
    )


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        temperature=0,
        max_completion_tokens=4,
        logprobs=True,
        top_logprobs=3,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(one.token for one in logprobs.content) == answer.choices[0].message.content
    for one in logprobs.content:
        assert len(one.top_logprobs) == 3
        assert one.top_logprobs[0].logprob == one.logprob  # greedy


def test_completion_logprobs_have_offsets(client: openai.OpenAI) -> None:
    choice = client.completions.create(
        model=MODEL, prompt=PROMPT, temperature=0, max_tokens=6, logprobs=2
    ).choices[0]
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert "".join(logprobs.tokens) == choice.text
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert choice.text[offset:].startswith(token)


def test_stop_strings_and_bias(client: openai.OpenAI, offline: LLM) -> None:
    whole = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=12)
    stop = whole.choices[0].text[3:6]
    cut = client.completions.create(
        model=MODEL, prompt=PROMPT, temperature=0, max_tokens=12, stop=[stop]
    )
    assert cut.choices[0].text == whole.choices[0].text.partition(stop)[0]
    token = offline.get_tokenizer().encode(" dog", add_special_tokens=False)[0]
    biased = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        temperature=0,
        max_tokens=3,
        logit_bias={str(token): 100},
        extra_body={"return_token_ids": True},
    )
    assert biased.choices[0].token_ids == [token] * 3  # type: ignore[attr-defined]


def test_extensions_of_vllm(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=10,
        extra_body={
            "min_p": 0.1,
            "top_k": 5,
            "min_tokens": 10,
            "repetition_penalty": 1.1,
            "ignore_eos": True,
            "stop_token_ids": [5],
            "priority": 3,
        },
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 10


def test_beam_search_finds_the_offline_sequences(client: openai.OpenAI, offline: LLM) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, n=3, max_tokens=6, extra_body={"use_beam_search": True}
    )
    (found,) = offline.beam_search(PROMPT, BeamSearchParams(beam_width=3, max_tokens=6))
    tokenizer = offline.get_tokenizer()
    num_prompt = len(tokenizer(PROMPT).input_ids)
    expected = [
        tokenizer.decode(one.tokens[num_prompt:], skip_special_tokens=True)
        for one in found.sequences
    ]
    assert [choice.text for choice in answer.choices] == expected


def test_the_next_turn_finds_its_prefix(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Please remember that my name is Ada. " * 4}]
    first = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_completion_tokens=20
    )
    said = {"role": "assistant", "content": first.choices[0].message.content}
    second = client.chat.completions.create(
        model=MODEL,
        messages=[*messages, said, {"role": "user", "content": "What is my name?"}],
        temperature=0,
        max_completion_tokens=20,
    )
    assert first.usage is not None
    assert second.usage is not None
    details = second.usage.prompt_tokens_details
    assert details is not None
    assert (details.cached_tokens or 0) >= first.usage.prompt_tokens


def test_a_cache_salt_keeps_prefixes_apart(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "A long and secret story about a frog. " * 4}]

    def cached(salt: str) -> int:
        usage = client.chat.completions.create(
            model=MODEL, messages=messages, max_completion_tokens=2, extra_body={"cache_salt": salt}
        ).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    assert cached("one") == 0
    assert cached("two") == 0
    assert cached("one") > 10


def test_many_requests_at_once(server: ServerProcess, offline: LLM) -> None:
    questions = [f"Say the number {number}." for number in range(24)]

    async def ask() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

            async def one(question: str) -> str | None:
                answer = await client.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": question}],
                    temperature=0,
                    max_completion_tokens=16,
                )
                return answer.choices[0].message.content

            return await asyncio.gather(*map(one, questions))

    texts = asyncio.run(ask())
    params = SamplingParams(temperature=0, max_tokens=16)
    chats: Any = [[{"role": "user", "content": question}] for question in questions]
    outputs = offline.chat(chats, params, use_tqdm=False)
    assert texts == [output.outputs[0].text for output in outputs]


def test_an_async_stream(server: ServerProcess, offline: LLM) -> None:
    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            stream = await client.chat.completions.create(
                model=MODEL, messages=HELLO, temperature=0, max_completion_tokens=20, stream=True
            )
            return "".join([c.choices[0].delta.content or "" async for c in stream])

    assert asyncio.run(ask()) == chat_text(offline, HELLO, temperature=0, max_tokens=20)


def test_models(client: openai.OpenAI) -> None:
    (card,) = client.models.list().data
    assert card.id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-9")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": 99}, "n"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_completion_tokens": 5000}, "messages"),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, "messages"),
        ({"messages": [{"role": "king", "content": "hi"}]}, "messages.0.role"),
        ({"messages": []}, "messages"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"stop": [""]}, "stop"),
        ({"min_tokens": 5, "max_tokens": 3}, "min_tokens"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
    ],
)
def test_bad_requests_name_the_field(client: openai.OpenAI, body: Any, param: str) -> None:
    given = {"model": MODEL, "messages": HELLO, **body}
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/chat/completions", body=given, cast_to=object)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_a_bad_tool_of_a_response_is_refused(client: openai.OpenAI) -> None:
    """schemathesis found a 500 here."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(
            model=MODEL, input="Hi", tools=[{"type": "function", "name": "", "parameters": {}}]
        )
    assert caught.value.param == "tools.0.name"


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="tiny_chat"):
        client.chat.completions.create(model="gpt-9", messages=HELLO)


def test_an_error_inside_a_stream_reaches_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="best_of"):
        list(
            client.completions.create(
                model=MODEL, prompt=PROMPT, best_of=3, n=1, max_tokens=4, stream=True
            )
        )


def test_responses_are_answered_stored_and_continued(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="Hello", temperature=0, max_output_tokens=30)
    assert first.status == "completed"
    assert first.output_text
    assert client.responses.retrieve(first.id).output_text == first.output_text
    second = client.responses.create(
        model=MODEL,
        input="What can you do?",
        previous_response_id=first.id,
        temperature=0,
        max_output_tokens=8,
    )
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_a_streamed_response_has_the_events_of_openai(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model=MODEL, input="Hello", temperature=0, max_output_tokens=30
    ) as stream:
        events = list(stream)
        final = stream.get_final_response()
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == final.output_text
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"


def test_a_response_in_a_json_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"size": {"enum": ["small", "large"]}},
        "required": ["size"],
        "additionalProperties": False,
    }
    answer = client.responses.create(
        model=MODEL,
        input="How large is a cat?",
        text={"format": {"type": "json_schema", "name": "cat", "schema": schema, "strict": True}},
        max_output_tokens=60,
    )
    assert json.loads(answer.output_text)["size"] in ("small", "large")
