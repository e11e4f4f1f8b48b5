"""How ranks come and go: with a server's engine thread, under torchrun, and with their rank 0."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch")

from flexinfer import AsyncLLM, SamplingParams
from flexinfer.errors import RankError
from helpers.rank_kit import children, folder_of, make_ranked_engine
from helpers.tiny_models import reference

PROMPT = list(range(20))
SCRIPT = """
import os, psutil, sys
from flexinfer import LLM, SamplingParams
llm = LLM(sys.argv[1], tensor_parallel_size=2, skip_tokenizer_init=True, device="cpu", threads=1,
          kv_cache_memory_bytes=1 << 20, chunk_bytes=4096)
params = SamplingParams(temperature=0, max_tokens=5)
(output,) = llm.generate([{"prompt_token_ids": list(range(20))}], params, use_tqdm=False)
print("rank", os.environ.get("RANK", 0), output.outputs[0].token_ids, flush=True)
if sys.argv[2:] == ["die"]:
    print(*[child.pid for child in psutil.Process().children()], flush=True)
    os.kill(os.getpid(), 9)
llm.close()
"""


def listening() -> set[tuple[str, int]]:
    """Addresses and ports, of this process and its children."""
    me = psutil.Process()
    connections = (one.net_connections("inet") for one in (me, *me.children()))
    return {tuple(c.laddr) for some in connections for c in some if c.status == psutil.CONN_LISTEN}


def test_on_one_machine_all_listen_on_the_loopback_interface() -> None:
    before = listening()
    engine = make_ranked_engine()
    try:
        assert {address for address, _ in listening() - before} == {"127.0.0.1"}
    finally:
        engine.close()
    del engine  # some of torch's are closed with the last tensor that is sharded
    gc.collect()
    assert listening() <= before


def test_an_idle_engine_ends_as_soon_as_a_rank_has_died() -> None:
    before = children()
    llm = AsyncLLM(
        folder_of("llama"),
        tensor_parallel_size=2,
        skip_tokenizer_init=True,
        device="cpu",
        threads=1,
        kv_cache_memory_bytes=1 << 20,
        chunk_bytes=4096,
    )
    (victim,) = children() - before
    thread: threading.Thread = llm._thread._thread
    os.kill(victim, signal.SIGKILL)
    thread.join(60.0)  # idle, it waits for nothing that could time out
    assert not thread.is_alive()
    assert llm._thread.ended is not None
    assert isinstance(llm._thread.ended.__cause__, RankError)
    assert children() <= before


@pytest.mark.slow
def test_torchrun_starts_the_ranks_and_one_of_them_answers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    result = subprocess.run(
        [*command, "--nproc-per-node", "2", str(script), folder_of("llama")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("rank")]
    assert lines == [f"rank 0 {reference('llama', tuple(PROMPT), 5)}"]


@pytest.mark.slow
def test_ranks_end_when_rank_0_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    result = subprocess.run(
        [sys.executable, str(script), folder_of("llama"), "die"],
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert result.returncode == -signal.SIGKILL
    (rank,) = result.stdout.splitlines()[-1].split()
    ended = threading.Event()
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(int(rank))
        for _ in range(600):
            if process.status() == psutil.STATUS_ZOMBIE:
                return
            ended.wait(0.1)
        raise AssertionError("rank 1 has outlived rank 0 by 60 s")


ORPHAN = """
import os, sys, time
from flexinfer.distributed.rank import end_with_parent
end_with_parent()
print(os.getpid(), flush=True)
time.sleep(60)
"""
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
print(child.stdout.readline().decode(), flush=True)
"""


def test_a_rank_ends_with_its_parent_whatever_it_waits_for() -> None:
    command = [sys.executable, "-c", PARENT, ORPHAN]
    pid = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists():
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("it is still there")


def test_a_rank_does_not_end_by_a_signal_that_rank_0_gets_too() -> None:
    """systemd sends SIGTERM to all processes of a service; rank 0 then lets requests end."""
    engine = make_ranked_engine()
    try:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        engine.add_request("a", [1, 2, 3], params)
        engine.step()
        for pid in children():
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        final = None
        while engine.has_unfinished_requests():
            for output in engine.step():
                final = output
        assert final is not None
        assert final.outputs[0].finish_reason == "length"
    finally:
        engine.close()
