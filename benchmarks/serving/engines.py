"""One engine, one process: `python engines.py ENGINE ...` runs the workloads and prints JSON lines.

Engines are made by a factory (model folder, dtype, threads) -> Engine; heavy imports sit inside, so
that each engine loads torch as it wants to. Peers may live in another Python's environment.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import workloads
from continuous_batching import ContinuousBatching
from kv_use import KVUse
from process_memory import MIB, PeakMemory, peak_resident_bytes
from workloads import Prompts

MAX_LEN = 2048
MAX_SEQS = 64
KV_BYTES = 1 << 30


class Engine(Protocol):
    def __call__(self, prompts: Prompts, num_new: int) -> Prompts: ...

    def close(self) -> None: ...


class FlexInfer:
    """FlexInfer's offline engine."""

    def __init__(self, folder: Path, dtype: str, threads: int, **settings: Any) -> None:
        from flexinfer import LLM

        self.llm = LLM(
            model=str(folder),
            dtype=dtype,
            max_model_len=MAX_LEN,
            max_num_seqs=MAX_SEQS,
            kv_cache_memory_bytes=KV_BYTES,
            skip_tokenizer_init=True,
            threads=threads,
            **settings,
        )
        self.engine = self.llm.llm_engine

    def __call__(self, prompts: Prompts, num_new: int, **sampling: Any) -> Prompts:
        params = self._params(num_new, **sampling)
        outputs = self.llm.generate(_token_prompts(prompts), params, use_tqdm=False)
        return _samples(outputs)

    def step_by_step(
        self, prompts: Prompts, num_new: int, after_step: Callable[[], None], **sampling: Any
    ) -> Prompts:
        """The same, with a call after each step."""
        ids = [f"watched-{index}" for index in range(len(prompts))]
        for request_id, prompt in zip(ids, _token_prompts(prompts), strict=True):
            self.engine.add_request(request_id, prompt, self._params(num_new, **sampling))
        done: dict[str, Any] = {}
        while len(done) < len(ids):
            for output in self.engine.step():
                if output.finished:
                    done[output.request_id] = output
            after_step()
        return _samples([done[request_id] for request_id in ids])

    def close(self) -> None:
        self.llm.close()

    def _params(self, num_new: int, temperature: float = 0.0, n: int = 1) -> Any:
        from flexinfer import SamplingParams

        return SamplingParams(temperature=temperature, n=n, max_tokens=num_new, ignore_eos=True)


class VLLM:
    """vLLM's CPU build, in one process, with its prefix cache."""

    def __init__(self, folder: Path, dtype: str, threads: int, *, eager: bool = True) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(KV_BYTES >> 30))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        from vllm import LLM

        self._llm = LLM(
            model=str(folder),
            dtype=dtype,
            max_model_len=MAX_LEN,
            max_num_seqs=MAX_SEQS,
            max_num_batched_tokens=2048,
            enforce_eager=eager,
            skip_tokenizer_init=True,
            disable_log_stats=True,
        )

    def __call__(
        self, prompts: Prompts, num_new: int, temperature: float = 0.0, n: int = 1
    ) -> Prompts:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=temperature, n=n, max_tokens=num_new, ignore_eos=True, detokenize=False
        )
        return _samples(self._llm.generate(_token_prompts(prompts), params, use_tqdm=False))

    def close(self) -> None:
        """Ends with the process."""


class TransformersBatch:
    """transformers' generate() on the whole round as one left-padded batch."""

    def __init__(self, folder: Path, dtype: str, threads: int) -> None:
        self._model = _load_transformers(folder, dtype, threads)

    def __call__(self, prompts: Prompts, num_new: int) -> Prompts:
        import torch
        from transformers import GenerationConfig

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
        out = self._model.generate(ids, attention_mask=mask, generation_config=config)
        return out[:, longest:].tolist()  # type: ignore[no-any-return]

    def close(self) -> None:
        """Holds nothing but memory."""


def transformers_continuous(folder: Path, dtype: str, threads: int) -> ContinuousBatching:
    """transformers' continuous batching: paged attention, shared prefix blocks."""
    return ContinuousBatching(
        _load_transformers(folder, dtype, threads),
        kv_bytes=KV_BYTES,
        page_tokens=32,
        max_batch_tokens=512,
        pad_token_id=3,
    )


def _samples(outputs: list[Any]) -> Prompts:
    """The tokens of all samples of all requests."""
    return [list(sample.token_ids) for output in outputs for sample in output.outputs]


def _token_prompts(prompts: Prompts) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def _load_transformers(folder: Path, dtype: str, threads: int) -> Any:
    import torch
    import transformers

    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    torch.set_grad_enabled(False)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval()


flexinfer = FlexInfer
ENGINES: dict[str, Callable[[Path, str, int], Engine]] = {
    "flexinfer": flexinfer,
    "flexinfer-no-cache": partial(flexinfer, enable_prefix_caching=False),
    "flexinfer-dense": partial(flexinfer, layers_per_plane=1),
    "flexinfer-compiled": partial(flexinfer, compile=True),
    "transformers-batch": TransformersBatch,
    "transformers-continuous": transformers_continuous,
    "vllm-cpu": VLLM,
    "vllm-cpu-compiled": partial(VLLM, eager=False),
}
DEFAULT_ENGINES = (
    "flexinfer",
    "flexinfer-no-cache",
    "transformers-batch",
    "transformers-continuous",
)
"""Those that need nothing but FlexInfer's own environment."""
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


def measure(
    args: argparse.Namespace, workload: str, engine: Engine, memory: PeakMemory
) -> dict[str, Any]:
    """A small warm-up, a first repetition, timed ones, and one in which memory is looked at.

    The first is told apart: an engine whose memory grows with the load takes it there.
    """
    now = CLOCKS[args.clock]
    workloads.run(workload, engine, args.seed, "warm-up", scale=4)
    speeds = []
    outputs: Prompts = []
    for repetition in ("first", *range(args.repetitions)):
        start = now()
        result = workloads.run(workload, engine, args.seed, repetition)
        speeds.append(round(result.num_new_tokens / (now() - start), 2))
        outputs = outputs or result.outputs
    row: dict[str, Any] = {
        "engine": args.engine,
        "size": args.size,
        "dtype": args.dtype,
        "workload": workload,
        "threads": args.threads,
        "first_tokens_per_s": speeds[0],
        "tokens_per_s": speeds[1:],
        "outputs": outputs,
    }
    if isinstance(engine, FlexInfer):
        row["map_us_exposed"] = round(engine.engine.manager.stats().map_us_exposed)
    return row | measure_memory(args, workload, engine, memory)


def measure_memory(
    args: argparse.Namespace, workload: str, engine: Engine, memory: PeakMemory
) -> dict[str, Any]:
    """One repetition more, not timed, with memory sampled all the while: MiB since the start."""
    if not isinstance(engine, FlexInfer):
        with memory:
            workloads.run(workload, engine, args.seed, "memory")
        return memory_row(memory)
    manager = engine.engine.manager
    kv = KVUse(engine.engine)
    with memory:
        watched = partial(engine.step_by_step, after_step=kv.see)
        workloads.run(workload, watched, args.seed, "memory")
    return memory_row(memory) | {
        "kv_resident_mib": round(manager.resident_bytes / MIB, 1),
        "kv_held_mib": round(kv.held_bytes / MIB, 1),
        "kv_needed_mib": round(kv.needed_bytes / MIB, 1),
        "kv_chunks_beyond_mean": round(kv.mean_chunks_beyond, 2),
        "kv_chunks_beyond_most": kv.most_chunks_beyond,
    }


def memory_row(memory: PeakMemory) -> dict[str, Any]:
    return {
        "peak_memory_mib": round(memory.peak_bytes / MIB, 1),
        "peak_resident_mib": round(peak_resident_bytes() / MIB, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--size", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--workloads", default=",".join(workloads.WORKLOADS))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()
    memory = PeakMemory()
    with memory:
        engine = ENGINES[args.engine](args.model, args.dtype, args.threads)
    for workload in args.workloads.split(","):
        print(json.dumps(measure(args, workload, engine, memory)), flush=True)
    engine.close()


if __name__ == "__main__":
    # Unpinned, Linux may leave both OpenMP threads on one core: each barrier then costs a time
    # slice. The variables count only when they stand before the process starts; bench.py sets them.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
