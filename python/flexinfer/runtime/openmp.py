"""OpenMP: the runtime that torch has loaded, which the kernels of this package enter too.

libgomp has a pool of threads for each thread that has ever entered a parallel region, and counts
them all: as soon as there are more than CPUs, an idle thread sleeps after a hundred rounds instead
of spinning for GOMP_SPINCOUNT, and each region then begins with waking it. So a thread that will
compute no more, such as the one that has loaded the model, gives its pool up.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

RUNTIME = re.compile(r"\S*/(?:libgomp|libiomp5|libomp)[^/\s]*\.so\S*$")
OMP_PAUSE_SOFT = 1
"""Of omp_pause_resource_all: OpenMP 5.0, section 3.2.44."""


@cache
def start_threads_address() -> int:
    """Address of GOMP_parallel in the OpenMP runtime that torch has loaded; 0 if there is none.

    Entering torch's own runtime makes one pool of threads serve both. Threads of another pool
    would find the cores taken: OpenMP's spin for a while after each parallel region.
    """
    for library in _runtimes():
        start = getattr(library, "GOMP_parallel", None)
        if start is not None:
            return ctypes.cast(start, ctypes.c_void_p).value or 0
    return 0


def release_threads() -> bool:
    """End the pool of the calling thread; its next parallel region makes a new one.

    False, and nothing done, if torch's runtime is not libgomp, or this is a parallel region.
    """
    for library in _runtimes():
        if "libgomp" in Path(library._name).name:
            return bool(library.omp_pause_resource_all(OMP_PAUSE_SOFT) == 0)
    return False


def use_one_thread() -> None:
    """Have all that the calling thread computes from now on run in it alone."""
    import torch

    torch.get_num_threads()  # a thread's first call of torch sets its number
    for library in _torch_runtimes():
        library.omp_set_num_threads(1)


@cache
def _torch_runtimes() -> tuple[ctypes.CDLL, ...]:
    """As torch has been loaded, no other will come."""
    return tuple(_runtimes())


def _runtimes() -> Iterator[ctypes.CDLL]:
    """Those in this process; torch's own copy comes first where there are several."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    paths = {match.group() for match in map(RUNTIME.search, lines) if match}
    for path in sorted(paths, key=lambda path: ("torch" not in path, path)):
        yield ctypes.CDLL(path)


def _before_fork() -> None:
    """A child has its parent's OpenMP pool without the threads, and the first parallel region, as
    of an engine of its own, would wait for them for ever. Without the pool each makes a new one."""
    if "torch" in sys.modules:
        release_threads()


os.register_at_fork(before=_before_fork)
