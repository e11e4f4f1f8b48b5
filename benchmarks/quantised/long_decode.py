"""Long decodes of whole models over KV of int8 and of their dtype; see README.md beside this file.

python benchmarks/quantised/long_decode.py --json FILE [--threads N] [--rounds N] [--quick]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

from load import prompts_of
from provenance import write_report

from flexinfer import LLM, SamplingParams

NUM_LAYERS = 4
NUM_KV_HEADS = 8
HIDDEN = 512
HEADS = ((32, 64), (32, 128), (8, 64), (8, 128))
"""Query heads and their size: Llama 3's, four for each KV head, and as many as there are of KV."""
DTYPES = ("float32", "bfloat16")
NUM_REQUESTS = 2
STEPS = 12
"""Of one side in a round."""
WAYS = ("auto", "int8")
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=8192, help="tokens before the decode")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument(
        "--clock",
        choices=list(CLOCKS),
        default="wall",
        help="processor: for one thread on a machine where others work, too",
    )
    parser.add_argument("--quick", action="store_true", help="a short context: only to see it work")
    arguments = parser.parse_args(argv)
    if arguments.clock == "processor" and arguments.threads != 1:
        parser.error("the processor's time is that of one thread: --threads 1")
    if arguments.quick:
        arguments.context, arguments.rounds = 256, 2
    load_before = os.getloadavg()
    rows = []
    for dtype in arguments.dtypes.split(","):
        for num_heads, head_dim in HEADS:
            rows.append(measure(num_heads, head_dim, dtype, arguments))
            _show(rows[-1])
    settings = {name: getattr(arguments, name) for name in ("threads", "clock", "context")}
    body = {**settings, "results": rows}
    write_report(arguments.json, "long_decode", body, load_before=load_before)


def measure(
    num_heads: int, head_dim: int, dtype: str, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Tokens a second of both ways, round by round in turns, on one model."""
    new_tokens = STEPS * (arguments.rounds + 1) + 2
    with TemporaryDirectory() as folder, ExitStack() as stack:
        save_model(folder, num_heads, head_dim, dtype)
        engines = {}
        for way in WAYS:
            llm = LLM(
                folder,
                dtype=dtype,
                kv_cache_dtype=way,
                skip_tokenizer_init=True,
                enable_prefix_caching=False,
                max_num_seqs=NUM_REQUESTS,
                max_model_len=arguments.context + new_tokens,
                kv_cache_memory_bytes=2 << 30,
                threads=arguments.threads,
            )
            stack.callback(llm.close)
            engines[way] = llm.llm_engine
            start(engines[way], arguments.context, new_tokens)
        rates: dict[str, list[float]] = {way: [] for way in WAYS}
        for round_idx in range(arguments.rounds + 1):
            for way in WAYS if round_idx % 2 else WAYS[::-1]:
                rate = decode(engines[way], CLOCKS[arguments.clock])
                if round_idx:
                    rates[way].append(rate)
    ratios = sorted(int8 / auto for auto, int8 in zip(rates["auto"], rates["int8"], strict=True))
    return {
        "dtype": dtype,
        "head_dim": head_dim,
        "num_heads": num_heads,
        "num_kv_heads": NUM_KV_HEADS,
        "auto_tokens_per_s": statistics.median(rates["auto"]),
        "int8_tokens_per_s": statistics.median(rates["int8"]),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def save_model(folder: str, num_heads: int, head_dim: int, dtype: str) -> None:
    """Random weights, few of them: it is attention that takes the time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=num_heads,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=head_dim,
        max_position_embeddings=16_384,
    )
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)


def start(engine: Any, context: int, new_tokens: int) -> None:
    """The prompts, none of whose beginnings are alike, to their first tokens."""
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    for i, prompt in enumerate(prompts_of(NUM_REQUESTS, context)):
        engine.add_request(f"long-{i}", [token % 500 for token in prompt], params)
    engine.step()
    while engine.last_step.num_prefill_tokens:
        engine.step()


def decode(engine: Any, now: Callable[[], float]) -> float:
    """Tokens a second of some steps."""
    begun = now()
    for _ in range(STEPS):
        engine.step()
    return NUM_REQUESTS * STEPS / (now() - begun)


def _show(row: dict[str, Any]) -> None:
    low, high = row["ratios"][0], row["ratios"][-1]
    print(
        f"| {row['dtype']}, {row['num_heads']} heads of {row['head_dim']} | "
        f"{row['auto_tokens_per_s']:.1f} | {row['int8_tokens_per_s']:.1f} | "
        f"**{row['ratio']:.2f}**, {low:.2f} to {high:.2f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
