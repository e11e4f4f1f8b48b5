"""LLM called as programs for vLLM call it, and in ways that it refuses; streams that others end."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer import LLM, EngineError, ReleasedError, RequestError, SamplingParams

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
    ],
)
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.chat(messages, GREEDY)
    with pytest.raises(RequestError, match="prompts must be one or several"):
        llm.generate(None)  # type: ignore[arg-type]
