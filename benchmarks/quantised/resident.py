"""What a process holds beside weights and KV, stage by stage: imports, loading, decodes, a prefill.

    python benchmarks/quantised/resident.py --json FILE --way int8 [--shape 1b] [--layers N]

A process for a way to quantise, which is added to those that the file has. MiB, each page once
(`../serving/process_memory.py`), pages of libraries in full.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "serving"))

from load import NUM_NEW, NUM_PROMPT, REPETITIONS, prompts_of
from model import SHAPES, make_folder
from process_memory import MIB, fields
from provenance import write_report

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="kept and added to")
    parser.add_argument("--way", default="int8", help="to quantise")
    parser.add_argument("--folder", type=Path, default=Path("build/quantised"), help="for models")
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    load_before = os.getloadavg()
    ways = json.loads(args.json.read_text())["ways"] if args.json.exists() else {}
    ways[args.way] = rows = stages(args)
    print(f"| {args.way} | own | of files | shared | beside |\n|---|---|---|---|---|")
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
