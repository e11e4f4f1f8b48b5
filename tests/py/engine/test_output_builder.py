"""What the caller sees of a sequence at its edges: its end, and before min_tokens."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("sortedcontainers")

from flexinfer import SamplingParams
from flexinfer.engine.output_builder import OutputBuilder
from flexinfer.engine.stream_pace import StreamPace
from flexinfer.outputs import RequestMetrics
from flexinfer.runner.plan import SampledToken
from flexinfer.scheduler.request import Request


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return bytes(token_ids).decode(errors="replace")


def written(text: bytes, **params: Any) -> tuple[str, Request]:
    """The output of a request that is given these bytes, as far as it goes on."""
    request = Request(
        request_id="a",
        prompt_token_ids=[ord("?")],
        params=SamplingParams(max_tokens=len(text), **params),
        max_num_tokens=1 + len(text),
        metrics=RequestMetrics(arrival_time=0.0),
    )
    builder = OutputBuilder(request, Bytes(), StreamPace())
    for token_id in text:
        request.append(token_id)
        builder.update(SampledToken(request.sampling_id, token_id))
        if request.is_finished:
            break
    return builder.build().text, request


def test_what_was_held_back_comes_with_the_end() -> None:
    """Two of three bytes of a character: shown as what they are, an incomplete one."""
    text, request = written("ab€".encode()[:-1])
    assert request.finish_reason == "length"
    assert text == "ab\ufffd"


@pytest.mark.parametrize(
    ("min_tokens", "shown"), [(0, "ab"), (2, "ab"), (3, "ab.cd"), (6, "ab.cd.e")]
)
def test_a_stop_string_counts_only_after_min_tokens(min_tokens: int, shown: str) -> None:
    text, _ = written(b"ab.cd.e", stop=["."], min_tokens=min_tokens)
    assert text == shown
