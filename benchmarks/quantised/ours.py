"""FlexInfer's side of compare.py: one process, one way to quantise.

python ours.py FOLDER QUANTIZATION THREADS CLOCK

It loads, says so in a line of JSON, and answers each line of its input, the name of a measure, with
another.
"""

from __future__ import annotations

import json
import sys
import time

from held import memory_of
from load import NUM_BATCH, NUM_NEW, NUM_PROMPT, REPETITIONS, prompts_of
from process_memory import MIB, PeakMemory

from flexinfer import LLM, SamplingParams

KV_BYTES = 256 << 20
now = {"wall": time.perf_counter, "processor": time.process_time}[sys.argv[4]]


def main() -> None:
    """Load, and measure what is asked for."""
    folder, quantization, threads, _ = sys.argv[1:]
    begun = time.monotonic()
    with PeakMemory() as memory:
        llm = LLM(
            folder,
            quantization=quantization,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=1024,
            kv_cache_memory_bytes=KV_BYTES,
            threads=int(threads),
        )
    llm.llm_engine.warm_up()
    generate(llm, 1, 16, 4)
    loaded = {
        "load_s": time.monotonic() - begun,
        "load_peak_mib": memory.peak_bytes / MIB,
    }
    print(json.dumps(loaded), flush=True)
    for line in sys.stdin:
        print(json.dumps(MEASURES[line.strip()](llm)), flush=True)
    llm.close()


def decode(llm: LLM) -> list[float]:
    """Tokens a second from the first token to the last."""
    return [decode_rate(llm, 1) for _ in range(REPETITIONS)]


def prefill(llm: LLM) -> list[float]:
    """Tokens of the prompt a second."""
    return [NUM_PROMPT / generate(llm, 1, NUM_PROMPT, 1) for _ in range(REPETITIONS)]


def batch(llm: LLM) -> list[float]:
    """New tokens a second of all requests at once."""
    count, length, num_new = NUM_BATCH
    return [count * num_new / generate(llm, count, length, num_new)]


def generate(llm: LLM, count: int, length: int, num_new: int) -> float:
    """Seconds for so many prompts, from nothing to the last token."""
    params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in prompts_of(count, length)]
    begun = now()
    llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
    return now() - begun


def decode_rate(llm: LLM, length: int) -> float:
    """Tokens a second from the first token to the last."""
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW + 1, ignore_eos=True)
    (prompt,) = prompts_of(1, length)
    llm.llm_engine.add_request("decode", prompt, params)
    llm.llm_engine.step()
    begun = now()
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    return NUM_NEW / (now() - begun)


MEASURES = {"decode": decode, "prefill": prefill, "batch": batch, "memory": memory_of}

if __name__ == "__main__":
    main()
