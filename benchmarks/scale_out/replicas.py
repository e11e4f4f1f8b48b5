"""Three replicas on Ray Serve, a conversation trace, and deaths: router by router.

python benchmarks/scale_out/replicas.py --trace mooncake_conversation_trace.jsonl.gz --json FILE
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

from provenance import write_report

from flexinfer import LLM
from flexinfer.cli.settings import SHIPPED_CHUNK_BYTES, SHIPPED_MODEL
from flexinfer.sampling_params import SamplingParams

BLOCK_TOKENS = 16
"""Of the trace's 512: the model has a context of 2,048."""
MAX_BLOCKS = 80
OUTPUT_TOKENS = (8, 48)
VOCABULARY = range(8, 1000)
RAY_OWN = "ray_prefix_affinity.PrefixCacheAffinityRouter"
ROUTERS = {name: name for name in ("cached-prefix", "power-of-two")} | {"prefix-affinity": RAY_OWN}


def conversations(trace: Path, num_requests: int) -> list[tuple[list[int], int]]:
    """Prompts and output lengths of the trace's conversations of more than one turn, in order."""
    with gzip.open(trace, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    rows = [row for row in rows if 2 <= len(row["hash_ids"]) <= MAX_BLOCKS]
    turns = Counter(row["hash_ids"][1] for row in rows)
    rows = [row for row in rows if turns[row["hash_ids"][1]] > 1][:num_requests]

    def block(number: int) -> list[int]:
        return random.Random(number).choices(VOCABULARY, k=BLOCK_TOKENS)

    low, high = OUTPUT_TOKENS
    return [
        (
            [token for number in row["hash_ids"] for token in block(number)],
            min(max(row["output_length"] // 16, low), high),
        )
        for row in rows
    ]


def alone(requests: list[tuple[list[int], int]], kept: Path | None) -> list[str]:
    """The right answers: those of one engine that nothing happens to, or of an earlier run."""
    if kept is not None and kept.exists():
        found: list[str] = json.loads(kept.read_text())
        return found
    params = [_params(num_tokens) for _, num_tokens in requests]
    with LLM(str(SHIPPED_MODEL), chunk_bytes=SHIPPED_CHUNK_BYTES) as llm:
        prompts: Any = [{"prompt_token_ids": ids} for ids, _ in requests]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    if kept is not None:
        kept.write_text(json.dumps(texts))
    return texts


def _params(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)


class Asked(NamedTuple):
    """A request that was answered."""

    start_s: float
    ttft_s: float
    num_prompt: int
    num_cached: int


class Run:
    def __init__(self, url: str, requests: list[tuple[list[int], int]]) -> None:
        self.url = url
        self.requests = requests
        self.texts: list[str | None] = [None] * len(requests)
        self.errors: list[str] = []
        self.asked: list[Asked] = []
        self.killed_s: list[float] = []
        """Since the start, as `Asked.start_s`."""
        self.start = time.perf_counter()

    async def ask(self, client: openai.AsyncOpenAI, number: int) -> None:
        prompt, num_tokens = self.requests[number]
        start, text = time.perf_counter(), ""
        first_s: float | None = None
        num_prompt = num_cached = 0
        try:
            stream = await client.completions.create(
                model="tiny_chat",
                prompt=prompt,
                max_tokens=num_tokens,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            async for chunk in stream:
                first_s = first_s or time.perf_counter() - start
                text += "".join(choice.text for choice in chunk.choices)
                if chunk.usage is not None:
                    num_prompt = chunk.usage.prompt_tokens
                    details = chunk.usage.prompt_tokens_details
                    num_cached = (details and details.cached_tokens) or 0
        except openai.OpenAIError as error:
            self.errors.append(f"{number}: {error}")
            return
        self.texts[number] = text
        asked = Asked(start - self.start, first_s or 0.0, num_prompt, num_cached)
        self.asked.append(asked)

    async def kill_now_and_then(self, every_s: float) -> None:
        rng = random.Random(0)
        async with httpx.AsyncClient(timeout=60) as client:
            while True:
                await asyncio.sleep(every_s)
                page = (await client.get(f"{self.url}/metrics")).text
                pids = set(re.findall(r'flexinfer:replica_process{.*pid="(\d+)"', page))
                if not pids:
                    raise RuntimeError("/metrics names no process of a replica: nobody to kill")
                if len(pids) > 1:  # one that is left has all to do
                    os.kill(int(rng.choice(sorted(pids))), signal.SIGKILL)
                    self.killed_s.append(time.perf_counter() - self.start)

    async def serve(self, concurrency: int, kill_every_s: float) -> None:
        client = openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", timeout=300, max_retries=0
        )
        waiting = iter(range(len(self.requests)))

        async def caller() -> None:
            for number in waiting:
                await self.ask(client, number)

        killer = asyncio.ensure_future(self.kill_now_and_then(kill_every_s))
        try:
            await asyncio.gather(*(caller() for _ in range(concurrency)))
        finally:
            killer.cancel()
            with suppress(asyncio.CancelledError):
                await killer

    def numbers(self, expected: list[str]) -> dict[str, Any]:
        ordered = sorted(asked.ttft_s for asked in self.asked)

        def percentile(share: float) -> float | None:
            return round(1e3 * ordered[int(share * (len(ordered) - 1))], 1) if ordered else None

        num_prompt = sum(asked.num_prompt for asked in self.asked)

        return {
            "num_requests": len(self.requests),
            "killed_s": [round(seconds, 1) for seconds in self.killed_s],
            "num_lost": self.texts.count(None),
            "num_wrong": sum(
                text is not None and text != right
                for text, right in zip(self.texts, expected, strict=True)
            ),
            "prefix_hit_rate": round(
                sum(asked.num_cached for asked in self.asked) / max(1, num_prompt), 4
            ),
            "ttft_ms": {"p50": percentile(0.5), "p99": percentile(0.99)},
            "errors": self.errors[:5],
            "slowest": [_row(asked) for asked in sorted(self.asked, key=lambda a: -a.ttft_s)[:12]],
        }


def _row(asked: Asked) -> dict[str, Any]:
    return {
        "start_s": round(asked.start_s, 1),
        "ttft_ms": round(1e3 * asked.ttft_s),
        "num_prompt": asked.num_prompt,
        "num_cached": asked.num_cached,
    }


@asynccontextmanager
async def serving(router: str, args: argparse.Namespace) -> Any:
    command = [sys.executable, "-m", "flexinfer.cli", "serve", "--port", str(args.port)]
    command += ["--replicas", str(args.replicas), "--router", ROUTERS[router]]
    command += ["--kv-cache-memory-bytes", args.kv_cache_memory_bytes]
    command += ["--prefix-cache-memory", args.kv_cache_memory_bytes, "--threads", "1"]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with tempfile.NamedTemporaryFile("r+") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": path}
        )
        try:
            while "Serving tiny_chat at" not in Path(log.name).read_text():
                if process.poll() is not None:
                    raise SystemExit(Path(log.name).read_text())
                await asyncio.sleep(0.2)
            yield f"http://127.0.0.1:{args.port}"
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trace", type=Path, required=True, help="Mooncake's, gzipped")
    parser.add_argument("--json", type=Path, help="where the numbers are added, by router")
    parser.add_argument("--answers", type=Path, help="where the right ones are kept between runs")
    parser.add_argument("--routers", nargs="+", default=list(ROUTERS), choices=list(ROUTERS))
    parser.add_argument("--num-requests", type=int, default=500)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--kill-every-s", type=float, default=20.0)
    parser.add_argument("--kv-cache-memory-bytes", default="128MiB")
    parser.add_argument("--port", type=int, default=18765)
    args = parser.parse_args()
    requests = conversations(args.trace, args.num_requests)
    expected = alone(requests, args.answers)
    found: dict[str, Any] = {}
    if args.json is not None and args.json.exists():
        found = json.loads(args.json.read_text())["routers"]
    for router in args.routers:
        load = os.getloadavg()[0]
        async with serving(router, args) as url:
            run = Run(url, requests)
            start = time.perf_counter()
            await run.serve(args.concurrency, args.kill_every_s)
            seconds = round(time.perf_counter() - start, 1)
        numbers = {**run.numbers(expected), "seconds": seconds, "load_before": round(load, 1)}
        found[router] = numbers
        print(json.dumps({router: numbers}), flush=True)
        settings = {name: str(value) for name, value in vars(args).items() if name != "json"}
        write_report(args.json, "replicas", {"settings": settings, "routers": found})


if __name__ == "__main__":
    asyncio.run(main())
