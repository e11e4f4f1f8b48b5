"""What `flexinfer serve` holds beside weights and KV, stage by stage, and the engine alone.

    python benchmarks/quantised/served.py --llama-bin DIR --json FILE --way Q8_0 [--layers N]

A server for a way to quantise (of model.py's), which is added to those that the file has. MiB, each
page once (`../serving/process_memory.py`), pages of libraries in full; the engine after all stages.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "serving"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "serving_http"))

import httpx
from compare import Ours
from load import NUM_NEW, NUM_PROMPT, REPETITIONS, prompts_of
from model import KINDS, OWN_FILES, SHAPES, make_model, opened_as
from process_memory import MIB, fields, memory_bytes
from processes import Server
from provenance import write_report

from flexinfer.engine.thread import IDLE_S

KV_BYTES = 256 << 20
Row = dict[str, Any]


def main() -> None:
    """Make the model if need be, measure the engine, then the server; print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--llama-bin", type=Path, required=True, help="where llama-quantize is")
    parser.add_argument("--json", type=Path, required=True, help="kept and added to")
    parser.add_argument("--way", choices=KINDS, default="Q8_0")
    parser.add_argument("--folder", type=Path, default=Path("build/quantised"), help="for models")
    parser.add_argument("--shape", choices=(*SHAPES, *OWN_FILES), default="1b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    load_before = os.getloadavg()
    ways = json.loads(args.json.read_text())["ways"] if args.json.exists() else {}
    folder = make_model(args.folder, args.shape, args.layers, [args.way], args.llama_bin)
    with Ours(folder, args.way, args.threads, "wall") as engine:
        for measure in ("decode", "prefill"):
            engine.measure(measure)
        alone = engine.measure("memory")
    stages = serve(folder, args.way, args.threads, alone["weights_mib"])
    ways[args.way] = {"engine": alone, "server": stages}
    print(f"| {args.way} | own | of files | KV | beside |\n|---|---|---|---|---|")
    for row in stages:
        sizes = [f"{row[name]:.0f}" for name in ("own", "files", "kv_mib", "beside_mib")]
        print(f"| {row['stage']} | " + " | ".join(sizes) + " |")
    print(f"| the engine alone after both | | | | {alone['beside_mib']:.0f} |")
    write_report(args.json, "quantised_served", {"ways": ways}, load_before=load_before)


def serve(folder: Path, way: str, threads: int, weights_mib: float) -> list[Row]:
    """A row for each stage."""
    model, quantization = opened_as(folder, way)
    settings = ["--quantization", quantization, "--dtype", "bfloat16", "--max-model-len", "1024"]
    settings += ["--kv-cache-memory-bytes", str(KV_BYTES), "--threads", str(threads)]
    settings += ["--no-enable-prefix-caching", "--port"]
    command = [str(Path(sys.executable).with_name("flexinfer")), "serve", str(model), *settings]
    with Server(command, {}, folder / "served.log") as server, httpx.Client(timeout=150) as client:

        def ask(length: int, num_new: int) -> None:
            (prompt,) = prompts_of(1, length)
            body = {"model": server.model, "prompt": prompt, "max_tokens": num_new}
            body |= {"temperature": 0, "ignore_eos": True}
            client.post(f"{server.url}/v1/completions", json=body).raise_for_status()

        rows = [held(server, client, "up", weights_mib)]
        for what, length, num_new in (("decodes", 1, NUM_NEW + 1), ("prefills", NUM_PROMPT, 1)):
            for _ in range(REPETITIONS):
                ask(length, num_new)
            count = NUM_NEW if what == "decodes" else NUM_PROMPT
            stage = f"after {REPETITIONS} {what} of {count} tokens"
            rows.append(held(server, client, stage, weights_mib))
        time.sleep(2 * IDLE_S)
        rows.append(held(server, client, f"{2 * IDLE_S:.0f} s later", weights_mib))
    return rows


def held(server: Server, client: httpx.Client, stage: str, weights_mib: float) -> Row:
    """MiB that the server holds now."""
    metrics = client.get(f"{server.url}/metrics").text
    found = re.search(r"^flexinfer:kv_cache_resident_bytes\{.*\} (\S+)$", metrics, re.MULTILINE)
    assert found is not None, "the server tells no resident bytes"
    kv_mib = float(found[1]) / MIB
    proc = Path(f"/proc/{server.process.pid}")
    pages = fields(proc / "smaps_rollup")
    return {
        "stage": stage,
        "rss": pages["Rss"] / MIB,
        "pss": pages["Pss"] / MIB,
        "own": pages["Pss_Anon"] / MIB,
        "files": fields(proc / "status")["RssFile"] / MIB,
        "kv_mib": kv_mib,
        "beside_mib": memory_bytes(proc) / MIB - weights_mib - kv_mib,
    }


if __name__ == "__main__":
    main()
