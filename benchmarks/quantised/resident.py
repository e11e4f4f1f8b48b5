"""What a process holds beside weights and KV, stage by stage: imports, loading, decodes, a prefill.

    python benchmarks/quantised/resident.py --json FILE [--shape 1b] [--layers N]

A process for each way to quantise. MiB, each page once (`../serving/process_memory.py`), pages of
libraries in full.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "serving"))

from load import NUM_NEW, NUM_PROMPT, REPETITIONS, prompts_of
from model import SHAPES, make_folder
from process_memory import MIB, fields
from provenance import write_report

WAYS = ("int8", "int4")
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("build/quantised"), help="for models")
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--way", choices=WAYS, help="only this one, in this process")
    args = parser.parse_args()
    if args.way is not None:
        print(json.dumps(stages(args)))
        return
    load_before = os.getloadavg()
    ways = {}
    for way in WAYS:
        command = [sys.executable, *sys.argv, "--way", way]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        ways[way] = json.loads(done.stdout.splitlines()[-1])
    for way, rows in ways.items():
        print(f"| {way} | own | of files | shared | beside |\n|---|---|---|---|---|")
        for row in rows:
            sizes = [f"{row.get(name, row['own'] + row['files']):.0f}" for name in COLUMNS]
            print(f"| {row['stage']} | " + " | ".join(sizes) + " |")
    write_report(args.json, "quantised", {"ways": ways}, load_before=load_before)


COLUMNS = ("own", "files", "shared", "beside_mib")


def sizes_now(stage: str, **more: float) -> Row:
    """MiB of this process now: anonymous pages, pages of files, shared memory."""
    parts, status = fields(Path("/proc/self/smaps_rollup")), fields(Path("/proc/self/status"))
    sizes = {"own": parts["Pss_Anon"], "files": status["RssFile"], "shared": parts["Pss_Shmem"]}
    return {"stage": stage, **{name: size / MIB for name, size in sizes.items()}, **more}


def stages(args: argparse.Namespace) -> list[Row]:
    """Each thing in its turn; what comes later is not imported before."""
    rows = [sizes_now("Python")]
    from flexinfer.runtime.torch_settings import set_up_torch

    set_up_torch(args.threads)
    rows.append(sizes_now("torch imported"))
    from flexinfer import LLM, SamplingParams

    rows.append(sizes_now("FlexInfer imported"))
    from transformers import PreTrainedModel

    assert PreTrainedModel is not None
    rows.append(sizes_now("transformers' models imported"))
    from held import memory_of

    llm = LLM(
        str(make_folder(args.folder, args.shape, args.layers)),
        quantization=args.way,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=1024,
        kv_cache_memory_bytes=256 << 20,
        threads=args.threads,
    )
    llm.llm_engine.warm_up()
    rows.append(sizes_now("loaded", **memory_of(llm)))
    for stage, length, num_new in (
        (f"after {REPETITIONS} decodes of {NUM_NEW} tokens", 1, NUM_NEW + 1),
        (f"after {REPETITIONS} prefills of {NUM_PROMPT} tokens", NUM_PROMPT, 1),
    ):
        params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
        for _ in range(REPETITIONS):
            prompts: Any = [{"prompt_token_ids": ids} for ids in prompts_of(1, length)]
            llm.generate(prompts, params, use_tqdm=False)
        rows.append(sizes_now(stage, **memory_of(llm)))
    llm.close()
    return rows


if __name__ == "__main__":
    main()
