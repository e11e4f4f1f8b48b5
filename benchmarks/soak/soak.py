"""A server under mixed load for long: nothing lost, nothing wrong, nothing left; see README.md."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx

from flexinfer import LLM
from flexinfer.cli.settings import SHIPPED_CHUNK_BYTES, SHIPPED_MODEL

sys.path.insert(0, str(Path(__file__).parent))

from questions import BAD, Good, make_good

BUDGETS = ("64MiB", "4MiB", "16MiB", "8MiB")
ADMIN_KEY = "soak-admin"
NUM_DISTINCT = 120
RSS_ALLOWANCE_BYTES = 48 << 20
"""Allocators keep some of what they once needed."""


@dataclass
class Report:
    """What happened; `problems` must stay empty."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    rss_bytes: list[int] = field(default_factory=list)

    def problem(self, text: str) -> None:
        self.problems.append(text[:500])


class Soak:
    """`num_requests` requests by `concurrency` callers, while somebody plays with the memory."""

    def __init__(self, url: str, pid: int, goods: list[Good], seed: int) -> None:
        self.report = Report()
        self._client = httpx.AsyncClient(
            base_url=url, timeout=120, limits=httpx.Limits(max_connections=256)
        )
        self._admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
        self._pid = pid
        self._goods = goods
        self._draw = Random(seed)
        self._num_left = 0

    async def run(self, num_requests: int, concurrency: int, seconds: float | None) -> None:
        await self._warm_up()
        before = await self._level()
        self._num_left = num_requests
        deadline = time.monotonic() + (seconds or float("inf"))
        chaos = asyncio.ensure_future(self._play_with_memory())
        await asyncio.gather(*(self._caller(deadline) for _ in range(concurrency)))
        chaos.cancel()
        await asyncio.gather(chaos, return_exceptions=True)
        await self._post("/admin/wake")
        after = await self._level()
        if after != before:
            self.report.problem(f"left behind: {before} before, {after} after")
        self._check_rss()
        await self._client.aclose()

    async def _warm_up(self) -> None:
        """Once through all requests: what is allocated once is no leak."""
        for good in self._goods:
            await self._ask(good)
        self.report.counts.clear()

    async def _caller(self, deadline: float) -> None:
        while self._num_left > 0 and time.monotonic() < deadline:
            self._num_left -= 1
            if self._num_left % 100 == 0:
                self.report.rss_bytes.append(_rss_bytes(self._pid))
            kind, good = self._draw.random(), self._draw.choice(self._goods)
            try:
                if kind < 0.1:
                    await self._leave_early(good)
                elif kind < 0.2:
                    await self._ask_badly()
                elif kind < 0.6:
                    await self._ask_streaming(good)
                else:
                    await self._ask(good)
            except Exception as error:
                self.report.problem(f"lost: {type(error).__name__}: {error}")

    async def _ask(self, good: Good) -> None:
        answer = await self._client.post(good.path, json=good.body)
        self.report.counts["whole"] += 1
        if answer.status_code != 200:
            self.report.problem(f"{answer.status_code}: {answer.text}")
            return
        choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
        self._compare(
            good, [one.get("text", one.get("message", {}).get("content")) for one in choices]
        )

    async def _ask_streaming(self, good: Good) -> None:
        texts = [""] * len(good.texts)
        is_done = False
        async with self._client.stream(
            "POST", good.path, json={**good.body, "stream": True}
        ) as answer:
            async for line in answer.aiter_lines():
                is_done |= line == "data: [DONE]"
                if not line.startswith("data: {"):
                    continue
                for choice in json.loads(line[6:]).get("choices", ()):
                    delta = choice.get("delta", {}).get("content") or choice.get("text") or ""
                    texts[choice["index"]] += delta
        self.report.counts["streamed"] += 1
        if not is_done:
            self.report.problem("a stream ended without [DONE]")
        self._compare(good, texts)

    async def _leave_early(self, good: Good) -> None:
        """Before the answer, or after its first piece."""
        self.report.counts["left early"] += 1
        if self._draw.random() < 0.5:
            task = asyncio.ensure_future(self._client.post(good.path, json=good.body))
            await asyncio.sleep(self._draw.random() * 0.05)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return
        async with self._client.stream(
            "POST", good.path, json={**good.body, "stream": True}
        ) as answer:
            async for _ in answer.aiter_lines():
                return

    async def _ask_badly(self) -> None:
        bad = self._draw.choice(BAD)
        answer = await self._client.post(
            bad.path, content=bad.content, headers={"Content-Type": "application/json"}
        )
        self.report.counts["malformed"] += 1
        if answer.status_code not in bad.statuses:
            self.report.problem(f"{bad.content[:80]!r} got {answer.status_code}: {answer.text}")

    def _compare(self, good: Good, texts: list[Any]) -> None:
        if tuple(texts) != good.texts:
            self.report.problem(f"wrong: {texts} instead of {good.texts} for {good.body}")

    async def _play_with_memory(self) -> None:
        """Change the budget, empty the prefix cache, sleep and wake, for ever."""
        while True:
            for budget in BUDGETS:
                await asyncio.sleep(0.5)
                # 400 and 409: what runs needs more.
                await self._post("/admin/budget", {"kv_cache_memory": budget}, (200, 400, 409))
            await self._post("/admin/budget", {"kv_cache_memory": BUDGETS[0]})
            await self._post("/admin/reset_prefix_cache")
            try:
                await self._post("/admin/sleep", {"level": self._draw.choice((1, 2))})
                await asyncio.sleep(0.2)
            finally:
                await self._post("/admin/wake")

    async def _post(self, path: str, body: Any = None, allowed: tuple[int, ...] = (200,)) -> None:
        answer = await self._client.post(path, json=body or {}, headers=self._admin)
        self.report.counts[path] += 1
        if answer.status_code not in allowed:
            self.report.problem(f"{path} got {answer.status_code}: {answer.text}")

    async def _level(self) -> dict[str, int]:
        """What the engine holds with nothing to do, and nothing recorded."""
        deadline = time.monotonic() + 30
        while True:
            await self._post("/admin/reset_prefix_cache")
            await self._post("/admin/budget", {"kv_cache_memory": BUDGETS[1]})
            await self._post("/admin/budget", {"kv_cache_memory": BUDGETS[0]})
            found = (await self._client.get("/admin/memory", headers=self._admin)).json()
            engine, stats = found["engine"], found["stats"]
            level = {name: engine[name] for name in ("num_running", "num_waiting", "num_swapped")}
            level |= {
                name: stats[name] for name in ("num_vtensors", "recorded_bytes", "swapped_bytes")
            }
            level["referenced_chunks"] = len(found["chunks"]) if stats["parked_bytes"] == 0 else 0
            if not any(level.values()) or time.monotonic() > deadline:
                return level
            await asyncio.sleep(0.1)

    def _check_rss(self) -> None:
        """Flat: the last fifth is no larger than the second one, but for what allocators keep."""
        samples = self.report.rss_bytes
        if len(samples) < 10:
            return
        fifth = len(samples) // 5
        early, late = max(samples[fifth : 2 * fifth]), max(samples[-fifth:])
        if late > early + RSS_ALLOWANCE_BYTES:
            self.report.problem(f"resident set grew from {early} to {late} bytes")


def _rss_bytes(pid: int) -> int:
    """Anonymous memory: the KV pool is shared memory, and changes with the budget."""
    found = re.search(
        r"^RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE
    )
    return int(found[1]) << 10 if found else 0


@contextmanager
def server() -> Iterator[tuple[str, int]]:
    """`flexinfer serve` with the shipped model; gives URL and process id."""
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "flexinfer.cli", "serve", "--port", "0", "--max-num-seqs", "8",
             "--kv-cache-memory-bytes", BUDGETS[0], "--log-level", "warning"],
            stderr=log, stdout=log, env={**os.environ, "FLEXINFER_ADMIN_API_KEY": ADMIN_KEY},
        )  # fmt: skip
        try:
            yield _wait_until_ready(process, Path(log.name)), process.pid
            process.send_signal(signal.SIGTERM)
            if process.wait(60) != 0:
                raise RuntimeError(f"the server ended with {process.returncode}")
        finally:
            process.kill()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    while process.poll() is None:
        if found := re.search(r"^Serving \S+ at (\S+)", log.read_text(), re.MULTILINE):
            try:
                if httpx.get(f"{found[1]}/ready").status_code == 200:
                    return found[1]
            except httpx.TransportError:
                pass
        time.sleep(0.1)
    raise RuntimeError(f"the server has not started:\n{log.read_text()}")


def run(num_requests: int, concurrency: int, seconds: float | None, seed: int) -> Report:
    with LLM(
        str(SHIPPED_MODEL), chunk_bytes=SHIPPED_CHUNK_BYTES, kv_cache_memory_bytes="32MiB"
    ) as llm:
        goods = make_good(llm, NUM_DISTINCT, seed)
    with server() as (url, pid):
        soak = Soak(url, pid, goods, seed)
        asyncio.run(soak.run(num_requests, concurrency, seconds))
    return soak.report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seconds", type=float, help="stop after this time")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start_s = time.monotonic()
    report = run(options.requests, options.concurrency, options.seconds, options.seed)
    rss = [number >> 20 for number in report.rss_bytes]
    print(f"{time.monotonic() - start_s:.0f} s; {dict(report.counts)}; RSS in MiB: {rss}")
    print("\n".join(report.problems[:20]) or "zero lost, zero wrong, nothing left behind")
    sys.exit(bool(report.problems))


if __name__ == "__main__":
    main()
