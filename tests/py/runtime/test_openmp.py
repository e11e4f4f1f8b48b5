"""OpenMP's threads: one pool a process, held by the thread that runs the engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

CODE = """
import asyncio, os, threading, time
import torch
from flexinfer.runtime.openmp import release_threads

torch.set_num_threads(2)

def num_other_threads():
    known = {thread.native_id for thread in threading.enumerate()}
    return len(set(map(int, os.listdir("/proc/self/task"))) - known)

def num_omp_threads():
    compute()
    return num_other_threads()

def settled(wanted):
    # A thread that has been joined is listed until the system has cleared it away.
    deadline = time.monotonic() + 60
    while num_other_threads() != wanted and time.monotonic() < deadline:
        time.sleep(0.001)
    return num_other_threads()

def compute(*_):
    torch.ones(1 << 20).add_(1).sum()

compute()
if not release_threads():
    print("none")
"""


def run(code: str) -> list[str]:
    names = ("OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    result = subprocess.run(
        [sys.executable, "-c", CODE + code],
        env={**clean, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    if result.stdout.startswith("none"):
        pytest.skip("torch's OpenMP is not libgomp")
    return result.stdout.split()


def test_a_released_pool_is_gone_and_comes_back() -> None:
    code = """
before = num_omp_threads()
release_threads()
print(settled(before - 1) - before, num_omp_threads() - before)
"""
    assert run(code) == ["-1", "0"]


def test_the_thread_that_made_an_async_engine_keeps_no_pool() -> None:
    """Each way ends with one thread that has computed, and one engine with the same threads."""
    make = """
from flexinfer import AsyncLLM, LLM
from helpers.tiny_models import make_model
settings = dict(skip_tokenizer_init=True, kv_cache_memory_bytes=16 << 20, chunk_bytes=4096)
torch.set_num_threads(2)  # the module has asked for one
compute()
"""
    offline = """
llm = LLM(make_model("llama"), **settings)
print(num_omp_threads())
"""
    (count,) = run(make + offline)
    asynchronous = f"""
llm = AsyncLLM(make_model("llama"), **settings)
asyncio.run(llm.call(compute))
print(settled({count}))
"""
    assert run(make + asynchronous) == [count]


def test_a_forked_child_computes_with_threads_of_its_own() -> None:
    """It has none of its parent's, for which it would wait for ever."""
    code = """
import signal
from flexinfer import LLM
compute()
child = os.fork()
if child == 0:
    signal.alarm(60)
    compute()
    os._exit(0)
print(os.waitpid(child, 0)[1], num_omp_threads() > 0)
"""
    assert run(code) == ["0", "True"]
