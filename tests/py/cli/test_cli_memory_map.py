"""The memory map: same letter, same holders."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from flexinfer.cli.memory_map import MapRow, group_chunks, live_rows, render_map, runs
from flexinfer.vtensor import KVSpec, VTensorManager

ROWS = [
    MapRow("conversation 1", (0, 1, 2, 3), 40),
    MapRow("conversation 2", (0, 1, 4), 30),
    MapRow("conversation 3", (0, 5, 6, 9), 40),
]


def text_of(rows: list[MapRow], width: int = 80) -> str:
    console = Console(file=StringIO(), width=width)
    console.print(render_map(rows, width))
    written: str = console.file.getvalue()  # type: ignore[attr-defined]
    return written


def test_chunks_are_grouped_by_who_holds_them() -> None:
    groups = {group.symbol: group for group in group_chunks(ROWS)}
    assert groups["A"].chunks == (0,)
    assert groups["B"].chunks == (1,)
    assert groups["B"].labels == ("conversation 1", "conversation 2")
    assert groups["a"].chunks == (2, 3)
    assert groups["c"].chunks == (5, 6, 9)


def test_the_map_reads_without_colours() -> None:
    text = text_of(ROWS)
    assert "conversation 1  ABaa\n" in text
    assert "conversation 3  Accc\n" in text
    assert "A  1 chunk in conversations 1, 2, 3  (chunk 0)" in text
    assert "c  3 chunks only in conversation 3  (chunk 5-6, 9)" in text


def test_long_rows_wrap_under_their_label() -> None:
    lines = text_of([MapRow("one", tuple(range(20)))], width=15).splitlines()
    assert lines[:2] == ["one  aaaaaaaaaa", "     aaaaaaaaaa"]


def test_more_groups_than_letters_begin_again() -> None:
    rows = [MapRow(f"row {idx}", (idx,)) for idx in range(30)]
    assert group_chunks(rows)[26].symbol == "a"


def test_runs_of_chunk_ids() -> None:
    assert runs(group_chunks(ROWS)[-1]) == [(5, 6), (9, 9)]


def test_rows_of_a_real_snapshot_show_aliased_chunks() -> None:
    spec = KVSpec(2, 1, 16, max_seq_len=256, layers_per_plane=1)
    with VTensorManager(spec, max_requests=4, memory_budget="1MiB", chunk_bytes=4096) as manager:
        tokens = list(range(200))
        first = manager.create(tokens)
        first.extend(200)
        first.record_prefix(tokens)
        second = manager.create(tokens)
        rows = live_rows(manager.snapshot(), {first.id: "one", second.id: "two"})
        assert [row.label for row in rows] == ["one", "two"]
        assert rows[0].chunks[:3] == rows[1].chunks[:3]
        assert len(rows[0].chunks) == 4  # 200 tokens, 64 in one chunk of one plane


def test_rows_that_differ_in_their_last_word_are_named_together() -> None:
    rows = [MapRow("prefix 1", (0,)), MapRow("prefix 2", (0,))]
    assert "A  1 chunk in prefixes 1, 2  (chunk 0)" in text_of(rows)
