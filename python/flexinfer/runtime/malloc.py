"""malloc as engines want it: it keeps what steps free, for all threads in one arena, until asked.

All of it is of the process, and for glibc alone: with another C library, or where the user has set
malloc by the environment, nothing happens.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -2, -3, -8
"""Parameters of mallopt(3)."""
MAX_MMAP_THRESHOLD = 32 << 20
"""glibc takes no more."""
APART_BYTES = 1 << 20
"""Weights from this size on lie in mappings of their own, outside the heap."""
KEPT_BYTES = 256 << 20
"""Free heap that is kept for the next step's activations."""


@cache
def share_one_arena() -> None:
    """Let threads that start from now on have no arena of their own.

    malloc's default is 8 for each core, and each keeps the free memory of its own highest hour: a
    server with 15 threads held 430 MiB free beside 211 in use, and touched more of it for an hour.
    With two, one of them the engine's, it held 25 more than with one, at the same speed.
    """
    mallopt = _own_mallopt()
    if mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(M_ARENA_MAX, 1)


@cache
def keep_freed_memory() -> None:
    """Have malloc keep what a step frees: else each activation above 128 KiB is mapped, faulted in
    page by page, and unmapped again, which costs more than computing it."""
    mallopt = _own_mallopt()
    if mallopt is None:
        return
    mallopt(M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD)
    mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
    mallopt(M_TOP_PAD, MAX_MMAP_THRESHOLD)


def return_freed_memory() -> None:
    """Give the system what malloc keeps free, in all arenas; after something large, or for sleep.

    Loading leaves the originals of converted and packed weights there, 46 MiB of a bfloat16 model
    of 61, and steps their activations. Where the C library is not glibc nothing happens.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
        _cut_own_arena()


def _cut_own_arena() -> None:
    """malloc_trim leaves what is free at the end of any arena but the main one, 18 MiB of an
    engine's thread: where a large block is freed, that goes."""
    libc, mallopt = ctypes.CDLL(None), _own_mallopt()
    if mallopt is None:
        return
    libc.malloc.restype = ctypes.c_void_p
    mallopt(M_TRIM_THRESHOLD, 0)
    mallopt(M_TOP_PAD, 0)
    libc.free(ctypes.c_void_p(libc.malloc(ctypes.c_size_t(APART_BYTES))))
    mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
    mallopt(M_TOP_PAD, MAX_MMAP_THRESHOLD)


@contextmanager
def large_blocks_apart() -> Iterator[None]:
    """Have malloc map each large block by itself, for the time that a model is loaded.

    A weight that is replaced by a packed one then goes back to the system at once, and leaves no
    hole in the heap, which steps would fill with what they keep. Does nothing where malloc is not
    ours to set.
    """
    mallopt = _own_mallopt()
    if mallopt is None:
        yield
        return
    mallopt(M_MMAP_THRESHOLD, APART_BYTES)
    mallopt(M_TOP_PAD, 0)  # else large blocks come out of the heap's end, grown for a small one
    try:
        yield
    finally:
        mallopt(M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD)
        mallopt(M_TOP_PAD, MAX_MMAP_THRESHOLD)


def _own_mallopt() -> Any | None:
    """glibc's mallopt; None: another C library, or the user has set malloc by the environment."""
    names = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
    is_users = any(name in os.environ for name in names)
    return None if is_users else getattr(ctypes.CDLL(None), "mallopt", None)
