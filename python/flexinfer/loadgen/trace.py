"""Trace files: arrival times and lengths of real requests, without their text.

    TIMESTAMP, ContextTokens, GeneratedTokens               Azure (Splitwise, ISCA 2024)
    num_prefill_tokens, num_decode_tokens                   vAttention, Sarathi-Serve
    timestamp (ms), input_length, output_length, hash_ids   Mooncake (FAST 2025)

The second has lengths only. Mooncake's equal hash ids are equal blocks of 512 tokens.
CSV or JSON lines, also with .gz.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import IO, Any

BLOCK_TOKENS = 512
"""Of one hash id."""
MAX_TOKENS = 1 << 30
"""Of a request: more is no length."""


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One request. `time_s` counts from the first; None where a trace has only lengths."""

    time_s: float | None
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...] = ()


def read_trace(file: Path, limit: int | None = None) -> list[TraceEntry]:
    """The first `limit` entries, in order of time. Raises ValueError with the line, or OSError."""
    with _readable(file), _opened(file) as opened:
        is_json = ".json" in "".join(file.suffixes)
        rows = _json_rows(opened, file) if is_json else _csv_rows(opened)
        entries = [
            _entry(row, file, number) for number, row in enumerate(islice(rows, limit), start=1)
        ]
    if not entries:
        raise ValueError(f"{file} has no requests")
    first = min((e.time_s for e in entries if e.time_s is not None), default=0.0)
    shifted = [
        e
        if e.time_s is None
        else TraceEntry(e.time_s - first, e.num_prompt_tokens, e.num_output_tokens, e.block_ids)
        for e in entries
    ]
    return sorted(shifted, key=lambda entry: entry.time_s or 0.0)


def _opened(file: Path) -> IO[str]:
    if file.suffix == ".gz":
        return gzip.open(file, "rt", encoding="utf-8")
    return file.open(encoding="utf-8")


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Raises ValueError that names `file` for one that is cut off, or no text: what readers raise
    does not name it, and click takes an EOFError for Ctrl-D."""
    try:
        yield
    except EOFError as error:
        raise ValueError(f"{file} is cut off: fetch it again") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not text in UTF-8") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{file} is no sound .gz file: {error}") from error
    except csv.Error as error:
        raise ValueError(f"{file} is not CSV: {error}") from error


def _json_rows(opened: IO[str], file: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(opened, start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ValueError(f"{file}, line {number}: not JSON: {error}") from error


def _csv_rows(opened: IO[str]) -> Iterator[dict[str, Any]]:
    yield from csv.DictReader(opened)


def _entry(row: Any, file: Path, number: int) -> TraceEntry:
    try:
        if not isinstance(row, dict):
            raise ValueError(f"a request is a JSON object, got {row!r}")
        if "ContextTokens" in row:
            time_s = _seconds(row["TIMESTAMP"])
            return _made(row, time_s, "ContextTokens", "GeneratedTokens")
        if "num_prefill_tokens" in row:
            return _made(row, None, "num_prefill_tokens", "num_decode_tokens")
        if "input_length" in row:
            time_s = _number(row, "timestamp") / 1e3
            return _made(row, time_s, "input_length", "output_length")
    except KeyError as error:
        raise ValueError(f"{file}, request {number}: there is no {error}") from error
    except ValueError as error:
        raise ValueError(f"{file}, request {number}: {error}") from error
    raise ValueError(f"{file}: no trace format has the columns {sorted(map(str, row))}")


def _made(row: dict[str, Any], time_s: float | None, prompt: str, output: str) -> TraceEntry:
    """Of these columns, and block ids where there are any."""
    block_ids = row.get("hash_ids", [])
    if not isinstance(block_ids, list):
        raise ValueError(f"hash_ids must be a list, got {block_ids!r}")
    num_prompt, num_output = (max(1, int(_number(row, c, MAX_TOKENS))) for c in (prompt, output))
    return TraceEntry(time_s, num_prompt, num_output, tuple(block_ids))


def _number(row: dict[str, Any], column: str, most: float = sys.float_info.max) -> float:
    try:
        number = float(row[column])
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= most:
        raise ValueError(f"{column} must be a number up to {most:g}, got {row[column]!r}")
    return number


def _seconds(text: Any) -> float:
    """Of "2023-11-16 18:17:03.9799600", with any number of digits."""
    if not isinstance(text, str):
        raise ValueError(f"TIMESTAMP must be text, got {text!r}")
    whole, _, fraction = text.partition(".")
    start = datetime.fromisoformat(whole).replace(tzinfo=UTC)
    return start.timestamp() + float(f"0.{fraction or 0}")
