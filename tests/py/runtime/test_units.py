"""Numbers of tokens as people write them."""

from __future__ import annotations

import pytest

from flexinfer.config import EngineConfig
from flexinfer.runtime.units import parse_count


@pytest.mark.parametrize(
    ("text", "number"),
    [("8192", 8192), ("8k", 8000), ("8K", 8192), (" 25.6k ", 25600), ("1.001k", 1001)],
)
def test_a_count_is_read_as_vllm_reads_it(text: str, number: int) -> None:
    assert parse_count("n", text) == number


@pytest.mark.parametrize("text", ["", "k", "8 k", "8kb", "-1", "1.5", "1e3", "0.0001k"])
def test_what_is_no_count_is_refused_by_its_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"n must be an integer, or text like .*got"):
        parse_count("n", text)


@pytest.mark.parametrize(
    ("given", "found"), [("4k", 4000), ("4K", 4096), (-1, None), ("auto", None), (None, None)]
)
def test_the_longest_request_may_be_written_so(given: int | str | None, found: int | None) -> None:
    config = EngineConfig(model="m", max_model_len=given, max_num_batched_tokens="2k")  # type: ignore[arg-type]
    assert (config.max_model_len, config.max_num_batched_tokens) == (found, 2000)


def test_no_seed_is_the_default_one() -> None:
    assert EngineConfig(model="m", seed=None).seed == 0  # type: ignore[arg-type]
