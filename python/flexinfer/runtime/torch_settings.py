"""TorchRuntime: torch loaded and set up for serving on this machine's CPUs.

What torch and libgomp read from the environment must stand there before torch is loaded, and is
taken away again, so that child processes do not inherit it. Loaded earlier by someone else, torch
gets only what can still be set. Measured on 2 cores with a Llama of 512 x 8, float32: the
allocator settings are worth 45 % of prefill, binding and spinning up to 15 % of decode.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from flexinfer.runtime.malloc import keep_freed_memory, share_one_arena
from flexinfer.runtime.threads import CpuQuota, choose_threads, cpu_quota

SPIN_COUNT = 20_000
"""Rounds that an idle OpenMP thread spins, up to 1 ms, before it sleeps: longer than the Python
between two operators of a step. libgomp's own 300,000 outlast a time slice: beside another busy
process, threads then spin while the one that they wait for is not running."""
MADV_COLLAPSE = 25
"""Of madvise(2), since Linux 6.1; not in Python's mmap."""
HUGE_PAGE_BYTES = 2 << 20
CACHED_PRIMITIVES = 128
"""Products that stay compiled, the latest used. oneDNN compiles one for each number of rows and
each shape of weight, in 1 ms and 0.5 MiB. As prompts differ in length, the 1,024 of its default
come into use in the course of time, in a cache of its own and in ideep's: 0.5 to 1 GiB."""
PRIMITIVE_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Read by oneDNN at the first product of the process, by ideep at the first of each thread."""


def set_up_torch(threads: int | None = None) -> int:
    """Load torch, unless it is loaded, and give it this many threads; returns how many.

    None leaves a number that the user has chosen (OMP_NUM_THREADS, torch.set_num_threads) as it is,
    and is else one for each core of the quota. Raises ValueError as `choose_threads`.
    """
    share_one_arena()
    quota = cpu_quota()
    count = choose_threads(threads, quota)
    is_own_choice = "OMP_NUM_THREADS" in os.environ
    with _environment(quota, count):
        import torch

        # The allocator reads its variable at the first tensor that may have a huge page.
        torch.empty(HUGE_PAGE_BYTES, dtype=torch.uint8)
    keep_freed_memory()
    if threads is not None or not (is_own_choice or torch.get_num_threads() <= count):
        torch.set_num_threads(count)
    bound_primitive_caches()
    return torch.get_num_threads()


def bound_primitive_caches() -> None:
    """Keep few compiled products. Each thread that will run a model calls it before it does.

    Where this thread has multiplied by a packed weight before, or torch cannot, nothing happens.
    """
    import torch

    mkldnn = torch.ops.mkldnn
    variables = dict.fromkeys(PRIMITIVE_CACHES, str(CACHED_PRIMITIVES))
    # AttributeError, RuntimeError: a torch without oneDNN, or without its packed products.
    with _added_variables(variables), suppress(AttributeError, RuntimeError):
        weight = mkldnn._reorder_linear_weight(torch.zeros(16, 16))
        mkldnn._linear_pointwise(torch.zeros(1, 16), weight, None, "none", [], "")


def back_by_huge_pages(address: int, num_bytes: int) -> bool:
    """Have the system put what lies here into pages of 2 MiB, now; whether it has done so.

    Packed weights so backed make a bfloat16 step 3 to 4 % shorter: the TLB misses less. A system
    that cannot (Linux before 6.1) leaves all as it is.
    """
    begin = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = (address + num_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if end <= begin:
        return False
    libc: Any = ctypes.CDLL(None)
    result: int = libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_COLLAPSE)
    return result == 0


def check_can_compile(device_type: str) -> None:
    """Raises ValueError if torch.compile has no C++ compiler for the CPU: it would find out in the
    first step. It takes the one that CXX names, else g++."""
    compiler = os.environ.get("CXX", "g++")
    if device_type == "cpu" and shutil.which(compiler) is None:
        raise ValueError(
            f"compile=True needs a C++ compiler, and there is no {compiler!r} on the PATH; "
            "install g++, name another one in CXX, or leave compile out"
        )


@contextmanager
def _environment(quota: CpuQuota, count: int) -> Iterator[None]:
    """Variables for the time that torch is loaded."""
    wanted = {} if "torch" in sys.modules else _variables(quota, count)
    with _added_variables(wanted) as added:
        try:
            yield
        finally:
            if "GOMP_CPU_AFFINITY" in added:
                # libgomp has bound this thread as well: its children would inherit one CPU.
                os.sched_setaffinity(0, quota.cpus)


@contextmanager
def _added_variables(wanted: dict[str, str]) -> Iterator[dict[str, str]]:
    """Environment variables for some time; those that the user has set stay."""
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield added
    finally:
        for name in added:
            del os.environ[name]


def _variables(quota: CpuQuota, count: int) -> dict[str, str]:
    """2 MiB pages for large tensors; threads that spin for a while; each on a CPU of its own.

    Unbound, Linux may keep two threads on one CPU: each barrier then costs a time slice. Bound are
    they only where all CPUs are ours to use, as another engine would choose the same.
    """
    wanted = {"THP_MEM_ALLOC_ENABLE": "1"}
    if "OMP_WAIT_POLICY" not in os.environ:
        wanted["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    is_bound = any(name in os.environ for name in ("OMP_PROC_BIND", "OMP_PLACES"))
    if 1 < count == len(quota.cpus) and not is_bound:
        wanted["GOMP_CPU_AFFINITY"] = " ".join(map(str, quota.cpus))
    return wanted
