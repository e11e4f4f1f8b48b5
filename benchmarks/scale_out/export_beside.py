"""How long steps wait while KV of 4,096 tokens is exported by copies.

    python benchmarks/scale_out/export_beside.py --json FILE

One process: a thread exports a vTensor of the pool's, all of whose chunks are copied, again and
again; another grows vTensors by a row of chunks at a time, as decodes do, and measures each time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

from provenance import write_report

from flexinfer.vtensor import KVSpec, VTensorManager

PAUSE_S = 0.001
"""Between two extensions."""


def measure(num_tokens: int, rounds: int, *, is_exported: bool) -> dict[str, float]:
    """Milliseconds that extensions took; and the exports beside them."""
    spec = KVSpec(16, 8, 64, "bfloat16", max_seq_len=num_tokens, layers_per_plane=16)
    needed = spec.bytes_per_token * num_tokens
    waits_ms: list[float] = []
    exports_ms: list[float] = []
    with VTensorManager(spec, max_requests=4, memory_budget=4 * needed) as manager:
        vtensor = manager.create()
        vtensor.extend(num_tokens)
        is_over = threading.Event()
        row_tokens = manager.chunk_bytes // spec.bytes_per_token

        def decode() -> None:
            while not is_over.is_set():
                growing = manager.create()
                for end in range(row_tokens, num_tokens // 4, row_tokens):
                    begin = time.perf_counter()
                    growing.extend(end)
                    waits_ms.append((time.perf_counter() - begin) * 1e3)
                    if is_over.wait(PAUSE_S):
                        break
                growing.release()

        thread = threading.Thread(target=decode)
        thread.start()
        for _ in range(rounds):
            begin = time.perf_counter()
            if is_exported:
                parcel = manager.export(vtensor)
                assert parcel.num_copied == parcel.num_chunks
                parcel.close()
            else:
                time.sleep(0.05)
            exports_ms.append((time.perf_counter() - begin) * 1e3)
        is_over.set()
        thread.join()
        vtensor.release()
    waits_ms.sort()
    return {
        "extensions": len(waits_ms),
        "median_ms": round(statistics.median(waits_ms), 3),
        "p99_ms": round(waits_ms[len(waits_ms) * 99 // 100], 2),
        "most_ms": round(waits_ms[-1], 2),
        "export_median_ms": round(statistics.median(exports_ms), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    before = [round(value, 1) for value in os.getloadavg()]
    rows = {
        name: measure(arguments.tokens, arguments.rounds, is_exported=is_exported)
        for name, is_exported in (("alone", False), ("beside exports", True))
    }
    print(rows, file=sys.stderr)
    settings = {"tokens": arguments.tokens, "rounds": arguments.rounds}
    body = {"settings": settings, "rows": rows}
    write_report(arguments.json, "scale_out_export_beside", body, load_before=before)


if __name__ == "__main__":
    main()
