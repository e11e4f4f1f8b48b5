"""Tokens a second of a mixture of experts: quantised, in bfloat16, in bfloat16 with transformers'
own experts, and with llama.cpp; one stream and 32 requests at once.

python benchmarks/quantised/mixture.py --json FILE [--llama-bin DIR] [--rounds 2]

Layers as those of Qwen3-30B-A3B, fewer of them and fewer experts, with random weights. All ways are
loaded, then measured in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

from gguf_files import make_files
from load import NUM_NEW
from model import VOCAB_SIZE, draw_weights
from provenance import write_report

OURS = Path(__file__).resolve().parent / "ours.py"
WAYS = ("auto", "int8", "int4", "int4-a8")
BASELINE = "transformers' experts"
WITHOUT_OURS = """
import runpy, sys
from flexinfer.layers import fuse
fuse.RULES = tuple(rule for rule in fuse.RULES if rule.fuse is not fuse.fuse_experts)
fuse.is_experts = lambda module: False
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
KINDS = ("Q8_0", "Q4_0")
MEASURES = ("decode", "batch")


def main(argv: Sequence[str] | None = None) -> None:
    """Make the model if need be, measure in turns, print medians, write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path("build/mixture"), help="for the model")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--llama-bin", type=Path, help="where llama-bench and llama-quantize are")
    arguments = parser.parse_args(argv)
    folder = make_model(arguments.folder, arguments.layers, arguments.experts)
    if arguments.llama_bin is not None:
        options = ("--output-tensor-type", "q8_0")
        make_files(folder, dict.fromkeys(KINDS, options), arguments.llama_bin)
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    loads = []
    with ExitStack() as stack:
        sides = {way: stack.enter_context(start(folder, way, arguments.threads)) for way in WAYS}
        sides[BASELINE] = stack.enter_context(start(folder, BASELINE, arguments.threads))
        for side in sides.values():
            answer(side)  # it is loaded
        for _ in range(arguments.rounds):
            loads.append(os.getloadavg()[0])
            for measure in MEASURES:
                for way, side in sides.items():
                    print(measure, file=side.stdin, flush=True)
                    found[way][measure] += answer(side)
            if arguments.llama_bin is not None:
                for kind in KINDS:
                    rates = llama(arguments.llama_bin, folder / f"{kind}.gguf", arguments.threads)
                    found[f"llama.cpp {kind}"]["decode"] += rates
        for side in sides.values():
            side.stdin.close()
    medians = {
        way: {measure: statistics.median(rates) for measure, rates in measures.items()}
        for way, measures in found.items()
    }
    for way, rates in medians.items():
        print(f"{way:24}", {measure: round(rate, 1) for measure, rate in rates.items()})
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "layers": arguments.layers,
        "experts": arguments.experts,
        "threads": arguments.threads,
        "load": loads,
        "tokens_per_s": medians,
        "all": found,
    }
    write_report(arguments.json, "quantised_mixture", report)


def start(folder: Path, way: str, threads: int) -> Any:
    """A process with the model in it, way: of WAYS, or BASELINE."""
    code = ["-c", WITHOUT_OURS] if way == BASELINE else []
    quantization = "auto" if way == BASELINE else way
    command = [sys.executable, *code, str(OURS), str(folder), quantization, str(threads), "wall"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def answer(side: Any) -> Any:
    """The next line of JSON."""
    for line in side.stdout:
        if line.startswith(("{", "[")):
            return json.loads(line)
    raise RuntimeError("a process has ended without an answer")


def llama(folder: Path, model: Path, threads: int) -> list[float]:
    """Tokens a second of one stream, by llama-bench."""
    command = [folder / "llama-bench", "-m", model, "-p", "0", "-n", str(NUM_NEW), "-r", "3"]
    result = subprocess.run(
        [*command, "-t", str(threads), "-o", "json"], check=True, capture_output=True, text=True
    )
    return [float(rate) for rate in json.loads(result.stdout)[0]["samples_ts"]]


def make_model(folder: Path, num_layers: int, num_experts: int) -> Path:
    """Made if it is missing."""
    path = folder / f"layers-{num_layers}-experts-{num_experts}"
    if (path / "model.safetensors").exists():
        return path
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=num_experts,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
    )
    model = draw_weights(Qwen3MoeForCausalLM, config)
    model.save_pretrained(path, max_shard_size="100GB")
    return path


if __name__ == "__main__":
    main()
