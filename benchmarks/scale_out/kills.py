"""How long an engine of two ranks takes to say that one was killed, and what is left then.

    python benchmarks/scale_out/kills.py --kills 50 --json FILE

A rank gets SIGKILL before a random step, or at a random moment within one, alternately.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import psutil
from provenance import write_report
from step import make_model

NUM_STEPS = 40
BATCH_SIZE = 4
MOST_DELAY_S = 0.03
"""About a step."""


def open_files() -> set[str]:
    """Sockets and memory files of this process; each has a number of its own."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.add(os.readlink(entry))
        except OSError:
            continue  # the folder's own
    return {name for name in found if name.startswith(("socket:", "/memfd:"))}


def make_engine(folder: str) -> Any:
    from flexinfer import LLMEngine
    from flexinfer.config import EngineConfig

    return LLMEngine.from_engine_args(
        EngineConfig(
            model=folder,
            tensor_parallel_size=2,
            skip_tokenizer_init=True,
            device="cpu",
            threads=1,
            kv_cache_memory_bytes="32MiB",
        )
    )


class Death:
    """Of a rank, before a random step of the engine's or, by odd seeds, within it."""

    def __init__(self, victim: psutil.Process, seed: int) -> None:
        rng = random.Random(seed)
        self.at_step = rng.randrange(NUM_STEPS)
        self.is_within = seed % 2 == 1
        self._delay_s = rng.uniform(0, MOST_DELAY_S)
        self._victim = victim
        self._killed_s = 0.0

    def strike(self) -> None:
        if self.is_within:
            threading.Timer(self._delay_s, self._kill).start()
        else:
            self._kill()

    def seconds_since(self) -> float:
        return time.perf_counter() - self._killed_s

    def _kill(self) -> None:
        self._killed_s = time.perf_counter()
        self._victim.send_signal(signal.SIGKILL)


def run_until_it_fails(engine: Any, death: Death) -> Exception:
    from flexinfer import SamplingParams
    from flexinfer.errors import RankError

    for i in range(BATCH_SIZE):
        prompt = {"prompt_token_ids": [(7 * i + j) % 8192 for j in range(32)]}
        engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=2 * NUM_STEPS))
    try:
        for step in range(2 * NUM_STEPS):
            if step == death.at_step:
                death.strike()
            engine.step()
    except RankError as error:
        if error.rank == 1:
            return error
        raise
    raise AssertionError(f"no step failed after a death at step {death.at_step}")


def kill_once(folder: str, seed: int) -> dict[str, Any]:
    before, files = {child.pid for child in psutil.Process().children()}, open_files()
    engine = make_engine(folder)
    (victim,) = (child for child in psutil.Process().children() if child.pid not in before)
    death = Death(victim, seed)
    error = str(run_until_it_fails(engine, death))
    error_s = death.seconds_since()
    engine.close()
    closed_s = death.seconds_since()
    del engine
    left = {child.pid for child in psutil.Process().children()} - before
    return {
        "at_step": death.at_step,
        "within_a_step": death.is_within,
        "error_s": error_s,
        "closed_s": closed_s,
        "error": error,
        "processes_left": len(left),
        "files_left": len(open_files() - files),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    load_before = list(os.getloadavg())
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder)
        rows = []
        for seed in range(options.kills):
            rows.append(kill_once(folder, seed))
            print({name: rows[-1][name] for name in ("at_step", "error_s", "closed_s")}, flush=True)
    found = {
        "kills": len(rows),
        "error_s_median": statistics.median(row["error_s"] for row in rows),
        "error_s_most": max(row["error_s"] for row in rows),
        "processes_left": sum(row["processes_left"] for row in rows),
        "files_left": sum(row["files_left"] for row in rows),
    }
    print(found)
    if options.json is not None:
        write_report(options.json, "kills", {**found, "rows": rows}, load_before=load_before)


if __name__ == "__main__":
    main()
