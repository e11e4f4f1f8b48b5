"""Pieces: each row once, in order, computed by threads that share no operator."""

from __future__ import annotations

import threading

import pytest
import torch

from flexinfer.runtime import pieces
from flexinfer.runtime.pieces import of_pieces
from flexinfer.runtime.process import ENGINE_THREADS


@pytest.mark.parametrize("num_rows", [1, 7, 64, 1000])
@pytest.mark.parametrize("row_bytes", [1, 3000, 1 << 30])
@pytest.mark.parametrize("multiple", [1, 64])
def test_every_row_is_in_one_piece_and_in_order(
    num_rows: int, row_bytes: int, multiple: int
) -> None:
    found = of_pieces(lambda some: some, num_rows, row_bytes, multiple)
    assert [row for some in found for row in range(some.start, some.stop)] == list(range(num_rows))
    sizes = [some.stop - some.start for some in found]
    assert all(size % multiple == 0 for size in sizes[:-1])
    assert max(sizes) <= max(multiple, pieces.BYTES_OF_PIECE // row_bytes)


def test_no_rows_are_no_pieces() -> None:
    assert of_pieces(lambda some: some, 0, 8) == []


def test_threads_of_pieces_compute_alone_and_the_caller_keeps_its_own() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = of_pieces(lambda _: torch.get_num_threads(), 64, pieces.BYTES_OF_PIECE)
        assert set(found) == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_there_are_no_more_threads_than_have_been_tried() -> None:
    """As many as for OpenMP would be too many where a limit was raised to what was asked for."""
    before = torch.get_num_threads()
    torch.set_num_threads(64)
    try:
        found = of_pieces(lambda _: threading.active_count(), 1000, pieces.BYTES_OF_PIECE)
    finally:
        torch.set_num_threads(before)
    assert max(found) - threading.active_count() <= ENGINE_THREADS


def test_an_error_in_a_piece_is_the_callers() -> None:
    def compute(some: slice) -> None:
        if some.start == 3:
            raise ValueError("the third")

    with pytest.raises(ValueError, match="the third"):
        of_pieces(compute, 64, pieces.BYTES_OF_PIECE)


def test_pieces_write_what_their_caller_made() -> None:
    """Threads do not inherit inference mode, out of which its tensors cannot be written."""
    with torch.inference_mode():
        table = torch.zeros(64)

        def fill(some: slice) -> None:
            table[some] = 1

        of_pieces(fill, 64, pieces.BYTES_OF_PIECE)
    assert table.sum() == 64
