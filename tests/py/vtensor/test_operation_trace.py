"""What stands in a trace. What a replay makes of it: test_replay.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flexinfer.errors import DriverError, TraceError
from flexinfer.replay.reader import TraceReader
from helpers.random_trace import SPEC, RandomLife, open_manager


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.trace"


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def operations(path: Path, op: str) -> list[dict[str, Any]]:
    return [record for record in records(path) if record.get("op") == op]


def test_the_header_has_the_configuration(path: Path) -> None:
    with open_manager(scrub="tenant", dedup=False) as manager:
        manager.start_trace(path)
    header = TraceReader(path).header
    assert (header.driver, header.chunk_bytes, header.max_requests) == ("sim", 4096, 6)
    assert header.spec["max_seq_len"] == SPEC.max_seq_len
    assert (header.options["scrub"], header.options["dedup"]) == ("tenant", False)


def test_tracing_off_writes_nothing(path: Path) -> None:
    with open_manager() as manager:
        RandomLife(manager, seed=1).run(50)
        assert not manager.tracing
        manager.stop_trace()
    assert not path.exists()


def test_a_stopped_trace_gets_no_more_lines(path: Path) -> None:
    with open_manager() as manager:
        manager.start_trace(path)
        manager.stop_trace()
        manager.create([1, 2, 3]).extend(3)
    assert [record.get("k") for record in records(path)] == [None, "end"]


def test_labels_stand_in_the_trace(path: Path) -> None:
    with open_manager() as manager:
        manager.start_trace(path)
        first = manager.create([1, 2], label='request "1"\n')
        second = manager.create([1, 2])
        manager.label(second, "zweite")
    labels = [(r["id"], r["label"]) for r in records(path) if r.get("k") == "label"]
    assert labels == [(first.id, 'request "1"\n'), (second.id, "zweite")]


def test_a_record_tells_what_was_aliased_copied_and_evicted(path: Path) -> None:
    with open_manager() as manager:
        manager.start_trace(path)
        RandomLife(manager, seed=2).run(200)
        stats = manager.stats()
    for key in ("aliased", "copied", "evicted", "adopted", "swapped_out"):
        total = sum(record.get(key, 0) for record in records(path) if record.get("k") == "op")
        assert total == getattr(stats, f"chunks_{key}")


def test_driver_calls_are_all_there(path: Path) -> None:
    with open_manager() as manager:
        before = manager.stats().driver_calls
        manager.start_trace(path)
        RandomLife(manager, seed=3).run(100)
        manager.stop_trace()
        after = manager.stats().driver_calls
    traced = [record["call"] for record in records(path) if record.get("k") == "call"]
    for kind, calls in after.items():
        assert traced.count(kind) == calls.calls - before[kind].calls


def test_tokens_are_written_once(path: Path) -> None:
    with open_manager() as manager:
        manager.start_trace(path)
        vtensor = manager.create([7, 8, 9])
        vtensor.extend(3)
        vtensor.record_prefix([7, 8, 9])
        manager.match_prefix([7, 8, 9])
    assert [r["ids"] for r in records(path) if r.get("k") == "tokens"] == [[7, 8, 9]]


def test_the_file_is_readable_by_its_owner_only(path: Path) -> None:
    with open_manager() as manager:
        manager.start_trace(path)
    assert path.stat().st_mode & 0o077 == 0


def test_a_folder_that_does_not_exist_is_an_error(path: Path) -> None:
    with open_manager() as manager, pytest.raises(DriverError, match="ENOENT"):
        manager.start_trace(path / "no" / "folder")


def test_a_trace_while_the_worker_runs_is_whole(path: Path) -> None:
    with open_manager(min_free_bytes=8 * 4096, max_free_bytes=12 * 4096) as manager:
        manager.start_trace(path)
        RandomLife(manager, seed=4, drain=False).run(300)
        manager.drain()
        manager.check_integrity()
    assert any(record.get("worker") for record in records(path))
    assert len(list(TraceReader(path))) > 300


# ------------------------------------------------------------------------------------ bad files


@pytest.fixture
def whole(path: Path) -> Path:
    with open_manager() as manager:
        manager.start_trace(path)
        RandomLife(manager, seed=5).run(40)
    return path


def test_a_file_cut_inside_a_line_names_the_line(whole: Path) -> None:
    text = whole.read_text()
    cut = text[: text.index("\n", len(text) // 2) - 1]  # half of the text may end with a line
    whole.write_text(cut)
    with pytest.raises(TraceError, match=f"line {cut.count(chr(10)) + 1}: cut off inside"):
        TraceReader(whole)


def test_a_file_without_its_end_says_what_is_missing(whole: Path) -> None:
    lines = whole.read_text().splitlines(keepends=True)
    whole.write_text("".join(lines[:-1]))
    with pytest.raises(TraceError, match=f"line {len(lines) - 1}: .*'end' record is missing"):
        TraceReader(whole)


def test_a_cut_off_file_is_read_as_far_as_it_goes(whole: Path) -> None:
    whole.write_text(whole.read_text()[:-200])
    reader = TraceReader(whole, allow_truncated=True)
    assert reader.truncated
    assert len(list(reader)) > 40


def test_a_lost_line_is_noticed(whole: Path) -> None:
    lines = whole.read_text().splitlines(keepends=True)
    whole.write_text("".join(lines[:10] + lines[11:]))
    with pytest.raises(TraceError, match="records were written, but"):
        list(TraceReader(whole))


def test_a_damaged_line_is_named(whole: Path) -> None:
    lines = whole.read_text().splitlines(keepends=True)
    lines[7] = "garbage\n"
    whole.write_text("".join(lines))
    with pytest.raises(TraceError, match="line 8: not a JSON object"):
        list(TraceReader(whole))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("hello\n", "not a trace"),
        ('{"a": 1}\n', "not a trace"),
        ('{"format":"flexinfer-tr', "cut off inside the header"),
        ('{"format":"flexinfer-trace","version":99}\n', "version 99, but only version 1"),
        ('{"format":"flexinfer-trace","version":1,"manager":{}}\n', "header lacks"),
    ],
)
def test_what_is_no_trace_is_refused(path: Path, text: str, message: str) -> None:
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        TraceReader(path)
