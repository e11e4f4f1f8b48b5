"""Process: what the system must let this process do, tried before any work. No torch."""

from __future__ import annotations

import os
import resource
import sys
import threading

from flexinfer.runtime.malloc import share_one_arena
from flexinfer.runtime.threads import choose_threads, cpu_quota

ENGINE_THREADS = 8
"""Of an engine, beside OpenMP's and the tokenizer's one for each CPU: its own, the worker, two that
compile grammars, and those that read weights."""


def num_server_threads() -> int:
    """Of a server, beside its engine's: asyncio's, for what takes long, and one that ends them."""
    return min(32, (os.cpu_count() or 1) + 4) + 1


def check_process(threads: int | None) -> None:
    """Raises OSError or ValueError where an engine with these `threads` cannot run."""
    if sys.flags.optimize > 1:
        raise ValueError(
            "python -OO (PYTHONOPTIMIZE=2) removes docstrings, and transformers cannot load models "
            "without them: start Python without it, or with -O"
        )
    check_threads(threads)


def check_threads(threads: int | None, num_others: int = 0) -> None:
    """Raises OSError unless all threads of an engine, and others, can be started: libgomp would
    end the process in the first step, and libraries in Rust panic. 50 us each."""
    share_one_arena()
    quota = cpu_quota()
    team = choose_threads(threads, quota)
    if threads is None:
        team = _chosen("OMP_NUM_THREADS", team)
    tokenizers = _chosen("RAYON_NUM_THREADS", quota.num_cpus)
    num_wanted = team + tokenizers + ENGINE_THREADS + num_others
    num_started = _num_startable(num_wanted)
    if num_started < num_wanted:
        raise OSError(
            f"the system lets this process start {num_started} threads, and {num_wanted} are "
            f"needed, {team} of them OpenMP's and {tokenizers} the tokenizer's: raise "
            f"{_limits()}, or lower threads (OMP_NUM_THREADS) and RAYON_NUM_THREADS"
        )


def _chosen(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    return (int(text) if text.isdecimal() else 0) or default


def _num_startable(num_wanted: int) -> int:
    """How many threads can be alive at once, beside those there are; at most num_wanted."""
    end = threading.Event()
    started: list[threading.Thread] = []
    try:
        while len(started) < num_wanted:
            thread = threading.Thread(target=end.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError:  # "can't start new thread"
        pass
    finally:
        end.set()
        for thread in started:
            thread.join()
    return len(started)


def _limits() -> str:
    """What may be too low: a thread's stack takes addresses, too."""
    named = {"ulimit -u": resource.RLIMIT_NPROC, "ulimit -v": resource.RLIMIT_AS}
    found = [name for name, of in named.items() if resource.getrlimit(of)[0] != -1]
    return " or ".join([*found, "pids.max of the container"])
