"""Pieces of a weight, some rows each, computed by several threads side by side.

What is computed of a piece stays in a core's cache, and malloc's heap serves it: blocks of a
weight's size are mapped and faulted in one by one while a model is loaded. And pieces wait for none
other. torch's threads share each operator and wait for one another at its end: while another
process runs on one of the CPUs, that is a time slice for many an operator.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from flexinfer.runtime.openmp import use_one_thread
from flexinfer.runtime.process import ENGINE_THREADS

T = TypeVar("T")
BYTES_OF_PIECE = 512 << 10


def of_pieces(
    compute: Callable[[slice], T], num_rows: int, row_bytes: int, multiple: int = 1
) -> list[T]:
    """What `compute` gives for the rows of each piece, in their order; row_bytes: of what it makes
    of a row on its way; multiple: of rows, in all pieces but the last."""
    step = max(1, BYTES_OF_PIECE // max(1, row_bytes * multiple)) * multiple
    pieces = [slice(first, min(first + step, num_rows)) for first in range(0, num_rows, step)]
    # No more than `process.check_threads` has tried: the engine's own are not running yet.
    threads = min(torch.get_num_threads(), ENGINE_THREADS, len(pieces))
    if threads < 2:
        return [compute(piece) for piece in pieces]
    is_inference = torch.is_inference_mode_enabled()  # which threads do not inherit

    def compute_piece(piece: slice) -> T:
        with torch.inference_mode(is_inference):
            return compute(piece)

    with ThreadPoolExecutor(threads, "flexinfer-pieces", use_one_thread) as pool:
        return list(pool.map(compute_piece, pieces))
