"""`flexinfer bench serve` tells what a server speculated, by vLLM's names."""

from __future__ import annotations

from typing import Any

import pytest

from flexinfer.cli.bench.drafts import read_counts, summarize_drafts
from flexinfer.cli.endpoint import EndpointError

TEXT = """# HELP {0}:spec_decode_num_drafts_total Proposals.
# TYPE {0}:spec_decode_num_drafts_total counter
{0}:spec_decode_num_drafts_total{{engine="0",model_name="a b"}} 10.0
{0}:spec_decode_num_draft_tokens_total{{engine="0",model_name="a b"}} 40.0
{0}:spec_decode_num_accepted_tokens_total{{engine="0",model_name="a b"}} 25.0
{0}:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} 9.0
"""


class Server:
    def __init__(self, text: str | None) -> None:
        self._text = text

    def get_text(self, path: str) -> str:
        if self._text is None:
            raise EndpointError("no metrics")
        return self._text


@pytest.mark.parametrize("prefix", ["flexinfer", "vllm"])
def test_counts_are_read_and_compared(prefix: str) -> None:
    server: Any = Server(TEXT.format(prefix))
    after = read_counts(server)
    assert after == {"num_drafts": 10, "num_draft_tokens": 40, "num_accepted_tokens": 25}
    before = {"num_drafts": 5.0, "num_draft_tokens": 20.0, "num_accepted_tokens": 10.0}
    assert summarize_drafts(before, after) == {
        "spec_decode_num_drafts": 5,
        "spec_decode_draft_tokens": 20,
        "spec_decode_accepted_tokens": 15,
        "spec_decode_acceptance_rate": 75.0,
        "spec_decode_acceptance_length": 4.0,
    }
    assert summarize_drafts(after, after) == {}


@pytest.mark.parametrize("text", [None, "flexinfer:engine_up 1.0\n"])
def test_a_server_that_does_not_speculate_says_nothing(text: str | None) -> None:
    server: Any = Server(text)
    assert read_counts(server) is None
    assert summarize_drafts(None, None) == {}
