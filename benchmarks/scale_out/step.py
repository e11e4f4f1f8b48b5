"""What a step of a tensor-parallel engine sends, and how long it takes, by number of ranks.

    python benchmarks/scale_out/step.py --json FILE

A random Llama (512 x 8, 8 KV heads, float32) serves the same requests on 1, 2 and 4 ranks of one
machine, a thread each. With fewer cores than ranks the times say what ranks cost, not what they
bring.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

from provenance import write_report

BATCH_SIZE = 8
PROMPT_TOKENS = 256
NUM_NEW = 64


def make_model(folder: str) -> None:
    import torch
    import transformers as tf

    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=1024,
        eos_token_id=None,
        bos_token_id=None,
    )
    tf.LlamaForCausalLM(config).save_pretrained(folder)


def measure(folder: str, num_ranks: int) -> dict[str, Any]:
    from flexinfer import LLMEngine, SamplingParams
    from flexinfer.config import EngineConfig

    start_s = time.perf_counter()
    engine = LLMEngine.from_engine_args(
        EngineConfig(
            model=folder,
            tensor_parallel_size=num_ranks,
            skip_tokenizer_init=True,
            device="cpu",
            threads=1,
            kv_cache_memory_bytes="64MiB",
        )
    )
    started_s = time.perf_counter() - start_s
    rows: dict[str, list[float]] = {"prefill": [], "decode": []}
    sent: dict[str, list[float]] = {"prefill": [], "decode": []}
    try:
        for i in range(BATCH_SIZE):
            prompt = {"prompt_token_ids": [(7 * i + j) % 8192 for j in range(PROMPT_TOKENS)]}
            engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=NUM_NEW))
        while engine.has_unfinished_requests():
            before = engine.ranks.sent_bytes if engine.ranks else 0
            step_s = time.perf_counter()
            engine.step()
            step_s = time.perf_counter() - step_s
            last = engine.last_step
            assert last is not None
            kind = "prefill" if last.num_prefill_tokens else "decode"
            rows[kind].append(step_s * 1e3)
            if engine.ranks:
                sent[kind].append(engine.ranks.sent_bytes - before)
        weight_bytes = (
            max(engine.ranks.weight_bytes.values())
            if engine.ranks
            else sum(parameter.nbytes for parameter in engine.loaded.model.parameters())
        )
        send_us = engine.ranks.send_s * 1e6 / sum(map(len, sent.values())) if engine.ranks else 0.0
    finally:
        engine.close()
    return {
        "ranks": num_ranks,
        "start_s": started_s,
        "decode_ms": statistics.median(rows["decode"]),
        "prefill_ms": statistics.median(rows["prefill"]),
        "decode_bytes": statistics.median(sent["decode"] or [0.0]),
        "prefill_bytes": statistics.median(sent["prefill"] or [0.0]),
        "send_us": send_us,
        "weight_mib": weight_bytes / 2**20,
        "kv_bytes_per_token": engine.manager.spec.bytes_per_token,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    load_before = list(os.getloadavg())
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder)
        rows = [measure(folder, num_ranks) for num_ranks in options.ranks]
    for row in rows:
        print({name: round(value, 2) for name, value in row.items()})
    if options.json is not None:
        write_report(options.json, "scale_out", {"rows": rows}, load_before=load_before)


if __name__ == "__main__":
    main()
