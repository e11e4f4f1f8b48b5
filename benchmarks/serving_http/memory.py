"""What two servers take of the machine's memory, with the same bytes for KV.

    python benchmarks/serving_http/memory.py --vllm-python VENV/bin/python \\
        --vllm-preload libtcmalloc_minimal.so.4:VENV/lib/libiomp5.so [--json FILE]

Ours runs first, as it comes; vLLM's cache then has as many bytes as ours held at most. One server
is up at a time. See README.md beside this file.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from defaults import Generator, arguments, prompt_arguments, run, server_commands, vllm_version
from processes import HERE, Server
from text_model import make_text_model

sys.path.insert(0, str(HERE.parent / "gpu_common"))
sys.path.insert(0, str(HERE.parent / "common"))

from harness import table
from provenance import write_report

Row = dict[str, Any]
MIB = 1 << 20
SAMPLE_INTERVAL_S = 0.5
OURS = "flexinfer"
SIZES = ("Pss", "Pss_Anon", "Pss_File", "Pss_Shmem")
COLUMNS = (
    "server",
    "num_processes",
    "kv_mib",
    "idle_mib",
    "loaded_mib",
    "peak_mib",
    "peak_less_kv_mib",
    "tokens_per_s",
)


def pss_bytes(server: Server) -> dict[str, int]:
    """Proportional set size of all of a server's processes, by kind: a page that n mappings share
    counts an n-th in each."""
    total = dict.fromkeys(SIZES, 0)
    for pid in server.pids():
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue  # it has ended meanwhile
        for name, kib in re.findall(r"^(\w+): +(\d+) kB", text, re.MULTILINE):
            if name in total:
                total[name] += int(kib) << 10
    return total


def kv_bytes(server: Server) -> int:
    """Physical memory behind the KV of `flexinfer serve`, now."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found = re.search(r"^flexinfer:kv_cache_resident_bytes\{.*\} (\S+)$", text, re.MULTILINE)
    assert found is not None, "the server tells no resident bytes"
    return int(float(found[1]))


@contextmanager
def watching(server: Server, *, is_ours: bool) -> Iterator[dict[str, int]]:
    """The highest that is seen meanwhile: of each kind, and of the KV, if the server tells it."""
    peaks = dict.fromkeys((*SIZES, "kv"), 0)
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            found = pss_bytes(server) | ({"kv": kv_bytes(server)} if is_ours else {})
            peaks.update({name: max(peaks[name], size) for name, size in found.items()})
            is_over.wait(SAMPLE_INTERVAL_S)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peaks
    finally:
        is_over.set()
        thread.join()


def measure(args: Any, name: str, server: Server, generator: Generator, folder: Path) -> Row:
    """Idle, under `rounds` loads, and two seconds after them."""
    idle, rates = pss_bytes(server), []
    with watching(server, is_ours=name == OURS) as peaks:
        for round_idx in range(args.rounds):
            prompts = prompt_arguments(args, "random", round_idx, folder)
            rates.append(run(args, generator, server, args.model, prompts)["tokens_per_s"])
    time.sleep(2)
    row: Row = {"server": name, "num_processes": len(server.pids()), "tokens_per_s": rates[-1]}
    row |= {"kv_bytes": peaks["kv"], "idle": idle, "peak": peaks, "loaded": pss_bytes(server)}
    return row


def columns(row: Row) -> Row:
    """For people: MiB. Our KV is all that is shared; of vLLM's, all may have been touched."""
    sizes = {f"{name}_mib": row[name]["Pss"] / MIB for name in ("idle", "loaded", "peak")}
    kv_mib = row["kv_bytes"] / MIB
    touched_mib = min(kv_mib, row["peak"]["Pss_Shmem"] / MIB) if row["server"] == OURS else kv_mib
    return {**row, **sizes, "kv_mib": kv_mib, "peak_less_kv_mib": sizes["peak_mib"] - touched_mib}


def main() -> None:
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.set_defaults(rounds=2, num_prompts=64)
    args = parser.parse_args()
    load_before = [round(value, 1) for value in os.getloadavg()]
    args.model = make_text_model(args.models, args.size).absolute()
    ours, vllm, variables = server_commands(args, args.model)
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="serving_http-") as name,
        Generator(args.vllm_python, Path(name) / "generator.log") as generator,
    ):
        folder = Path(name)
        with Server([*ours, "--port"], {}, folder / "flexinfer.log") as server:
            rows.append(measure(args, OURS, server, generator, folder))
        kv_size = rows[0]["kv_bytes"]
        vllm += ["--kv-cache-memory-bytes", str(kv_size)]
        del variables["VLLM_CPU_KVCACHE_SPACE"]  # it would win
        with Server([*vllm, "--port"], variables, folder / "vllm.log") as server:
            rows.append(measure(args, "vllm", server, generator, folder) | {"kv_bytes": kv_size})
    rows = [columns(row) for row in rows]
    print(table(rows, COLUMNS))
    settings = {name: str(value) for name, value in vars(args).items() if name != "json"}
    body = {"settings": settings, "rows": rows}
    version = vllm_version(args.vllm_python)
    write_report(args.json, "serving_http memory", body, load_before=load_before, vllm=version)
    print(json.dumps({row["server"]: row["peak_mib"] for row in rows}))


if __name__ == "__main__":
    main()
