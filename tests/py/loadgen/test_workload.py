"""What load is made of: arrivals, prompts and traces."""

from __future__ import annotations

import gzip
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

aiohttp = pytest.importorskip("aiohttp")

from flexinfer.loadgen.arrivals import gamma_arrivals
from flexinfer.loadgen.trace import read_trace
from flexinfer.loadgen.vocabulary import TokenVocabulary, WordVocabulary
from flexinfer.loadgen.workload import (
    RandomLengths,
    TraceScale,
    custom_workload,
    random_workload,
    trace_workload,
)
from helpers.tiny_models import make_tokenizer

# Arrivals.


def test_poisson_gaps_have_the_mean_and_spread_of_the_rate() -> None:
    gaps = np.diff(gamma_arrivals(20_000, 50.0, 1.0, random.Random(0)))
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.05)


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_burstiness_is_the_shape_of_the_gaps(burstiness: float) -> None:
    gaps = np.diff(gamma_arrivals(20_000, 10.0, burstiness, random.Random(1)))
    assert gaps.mean() == pytest.approx(0.1, rel=0.05)
    assert (gaps.std() / gaps.mean()) ** 2 == pytest.approx(1 / burstiness, rel=0.1)


def test_an_infinite_rate_issues_all_at_once() -> None:
    assert gamma_arrivals(3, float("inf"), 1.0, random.Random()) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("rate", "burstiness"), [(0, 1), (-1, 1), (float("nan"), 1), (1, 0)])
def test_rates_that_can_not_be_are_refused(rate: float, burstiness: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        gamma_arrivals(1, rate, burstiness, random.Random())


# Prompts.


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    make_tokenizer().save_pretrained(tmp_path)
    return tmp_path / "tokenizer.json"


def test_random_prompts_share_a_prefix_and_have_the_lengths_asked_for(tokenizer_file: Path) -> None:
    vocabulary = TokenVocabulary(tokenizer_file, as_text=False)
    load = random_workload(40, RandomLengths(30, 8, 0.5, prefix_len=10), vocabulary, seed=3)
    prompts: list[Any] = [request.prompt for request in load.requests]
    assert len({tuple(prompt[:10]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 40
    assert {len(prompt) for prompt in prompts} <= set(range(25, 56))
    assert {request.num_output_tokens for request in load.requests} <= set(range(4, 13))
    assert [request.num_prompt_tokens for request in load.requests] == list(map(len, prompts))


def test_prompts_hold_no_special_tokens(tokenizer_file: Path) -> None:
    drawn = TokenVocabulary(tokenizer_file, as_text=False).draw(5000, random.Random(0))
    assert set(drawn).isdisjoint(make_tokenizer().all_special_ids)


def test_a_seed_draws_the_same_prompts_again() -> None:
    lengths = RandomLengths(20, 8, 0.3)
    first, second = (random_workload(5, lengths, WordVocabulary(), 7) for _ in range(2))
    assert first == second
    assert random_workload(5, lengths, WordVocabulary(), 8) != first


def test_custom_prompts_are_drawn_again_when_they_run_out(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a b"}\n\n{"prompt": "c", "output_tokens": 3}\n')
    load = custom_workload(file, 4, 9, seed=0)
    assert sorted((str(r.prompt), r.num_output_tokens) for r in load.requests) == [
        *[("a b", 9)] * 2,
        *[("c", 3)] * 2,
    ]


@pytest.mark.parametrize(
    "line", ['{"text": "b"}', "{", "3", '{"prompt": "b", "output_tokens": "x"}']
)
def test_a_line_that_is_no_prompt_is_named(line: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n' + line)
    with pytest.raises(ValueError, match=r"prompts\.jsonl, line 2: "):
        custom_workload(file, 4, 9, seed=0)


def test_lengths_that_can_not_be_are_refused_by_their_option() -> None:
    with pytest.raises(ValueError, match="--random-output-len must be at least 1, got 0"):
        RandomLengths(4, 0)


# Traces.

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9805900,396,109\n"
)
VATTENTION = (
    "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n7564.0,192.0,7756.0,3\n"
)
MOONCAKE = (
    '{"timestamp": 500, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}\n'
    '{"timestamp": 0, "input_length": 600, "output_length": 4, "hash_ids": [0, 9]}\n'
)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("azure.csv", AZURE, [(0.0, 374, 44), (4.3, 396, 109)]),
        ("lengths.csv", VATTENTION, [(None, 7564, 192)]),
        ("mooncake.jsonl", MOONCAKE, [(0.0, 600, 4), (0.5, 1100, 5)]),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_traces_are_read_in_order_of_time(
    name: str, text: str, expected: list[Any], packed: bool, tmp_path: Path
) -> None:
    file = tmp_path / (f"{name}.gz" if packed else name)
    file.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    entries = read_trace(file)
    assert [(e.num_prompt_tokens, e.num_output_tokens) for e in entries] == [
        (prompt, output) for _, prompt, output in expected
    ]
    assert [e.time_s for e in entries] == [
        time_s if time_s is None else pytest.approx(time_s) for time_s, _, _ in expected
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [("a,b\n1,2\n", "no trace format"), ("", "no requests"), (AZURE + "x,y,z\n", "request 3")],
)
def test_a_file_that_is_no_trace_is_refused(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(text)
    with pytest.raises(ValueError, match=says):
        read_trace(file)


LENGTHS = "num_prefill_tokens,num_decode_tokens\n"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.csv", LENGTHS + "inf,2\n", "num_prefill_tokens must be a number up to"),
        ("a.csv", LENGTHS + "nan,2\n", "num_prefill_tokens must be a number up to"),
        ("a.csv", LENGTHS + "1e300,2\n", "num_prefill_tokens must be a number up to"),
        ("a.csv", LENGTHS + "5\n", "num_decode_tokens must be a number .*, got None"),
        ("a.jsonl", '{"timestamp": 1, "input_length": 5}\n', "there is no 'output_length'"),
        ("a.jsonl", '{"timestamp": "nan", "input_length": 5}\n', "timestamp must be a number"),
        ("a.jsonl", '{"timestamp": 1e400, "input_length": 5}\n', "timestamp must be a number"),
        ("a.jsonl", "3\n", "a request is a JSON object, got 3"),
        ("a.jsonl", MOONCAKE.replace("[0, 1, 2]", "3"), "hash_ids must be a list, got 3"),
    ],
)
def test_a_request_of_a_trace_that_is_wrong_is_named_in_words(
    name: str, text: str, says: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ValueError, match=rf"{name}, request 1: {says}"):
        read_trace(file)


PACKED = gzip.compress(AZURE.encode(), mtime=0)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("cut.csv.gz", PACKED[:-20], "cut off"),
        ("flat.csv.gz", AZURE.encode(), "no sound .gz file"),
        ("torn.csv.gz", PACKED[:10] + b"\xff" * 50, "no sound .gz file"),
        ("bytes.csv", b"\x80\x81\xff\n", "not text in UTF-8"),
        ("bytes.jsonl", b"\x80\x81\xff\n", "not text in UTF-8"),
        ("long.csv", b"a" * 200_000 + b"\n1\n", "not CSV"),
        ("ragged.csv", b"a,b\n1,2,3\n", "no trace format"),
    ],
)
def test_a_file_that_can_not_be_read_is_named(
    name: str, content: bytes, says: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}:? .*{says}"):
        read_trace(file)


def test_equal_blocks_of_a_trace_are_equal_text(tmp_path: Path, tokenizer_file: Path) -> None:
    file = tmp_path / "mooncake.jsonl"
    file.write_text(MOONCAKE)
    vocabulary = TokenVocabulary(tokenizer_file, as_text=False)
    load = trace_workload(file, None, TraceScale(time=2.0, length=1 / 16), vocabulary, seed=0)
    first, second = ([*request.prompt] for request in load.requests)
    assert load.arrivals_s == [0.0, 1.0]
    assert (len(first), len(second)) == (round(600 / 16), round(1100 / 16))
    assert first[:32] == second[:32]
    assert first[32:] != second[32 : len(first)]


def test_lengths_of_a_trace_are_bounded(tmp_path: Path) -> None:
    file = tmp_path / "azure.csv"
    file.write_text(AZURE)
    scale = TraceScale(length=0.5, max_input_len=190, max_output_len=30)
    load = trace_workload(file, 2, scale, WordVocabulary(), seed=0)
    assert [r.num_prompt_tokens for r in load.requests] == [187, 190]
    assert [r.num_output_tokens for r in load.requests] == [22, 30]
