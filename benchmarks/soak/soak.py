"""A server under mixed load for long: nothing lost, nothing wrong, nothing left; see README.md."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx

from flexinfer import LLM
from flexinfer.cli.settings import SHIPPED_CHUNK_BYTES, SHIPPED_MODEL

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

from provenance import write_report
from questions import BAD, Dialogue, Good, make_dialogues, make_good
from soak_report import SoakReport
from soak_server import ADMIN_KEY, SoakServer, counters, soak_server

BUDGETS = ("64MiB", "2MiB", "16MiB", "4MiB")
"""The first one is the server's own, and enough for all callers; the others are not."""
SERVER = ("--max-num-seqs", "8", "--kv-cache-memory-bytes", BUDGETS[0], "--swap-space", "32MiB")
NUM_DISTINCT = 150
NUM_DIALOGUES = 12
SAMPLE_INTERVAL_S = 0.5
LULL_INTERVAL_S = 30.0
"""Now and then nobody asks: what is kept can be told from what is asked just then."""
LEVEL_TIMEOUT_S = 30.0
TIMEOUT_S = 900.0
"""Longer than any starved machine needs: how long the slowest request took is reported."""
LEAVING, BAD_ONES, TALKING, STREAMING = 0.1, 0.2, 0.25, 0.6
"""Cumulated shares of the kinds of requests; the rest is answered whole."""


class Soak:
    """`num_requests` requests by `concurrency` callers, while somebody plays with the memory."""

    def __init__(
        self,
        server: SoakServer,
        goods: list[Good],
        dialogues: list[Dialogue],
        seed: int,
        pause_s: float,
    ) -> None:
        self.report = SoakReport()
        self._server = server
        self._goods = goods
        self._dialogues = dialogues
        self._draw = Random(seed)
        self._pause_s = pause_s
        self._num_left = 0
        self._num_asking = 0
        self._may_ask = asyncio.Event()
        self._may_ask.set()
        self._client: httpx.AsyncClient
        self._admin: httpx.AsyncClient

    async def run(self, num_requests: int, concurrency: int, seconds: float | None) -> None:
        async with self._clients():
            await self._warm_up(concurrency)
        self.report.before, before = await self._level(), await self._counters()
        self._num_left = num_requests
        start_s = time.monotonic()
        async with self._clients():
            background = [self._play_with_memory(start_s), self._sample(start_s)]
            deadline = start_s + (seconds or float("inf"))
            callers = [self._caller(deadline) for _ in range(concurrency)]
            for failure in await _with_background(callers, background):
                self.report.problem(f"lost: {type(failure).__name__}: {failure}")
            await self._post("/admin/wake")
        self.report.seconds = time.monotonic() - start_s
        self.report.counters = await self._counters()
        self.report.counters.subtract(before)
        self.report.after = await self._level()
        self.report.judge()

    @asynccontextmanager
    async def _clients(self) -> AsyncIterator[None]:
        """Connections are closed at the end, so that they count in no level."""
        # An idle connection is dropped here before the server drops it, after 5 s: who sends just
        # then would lose a request to nobody's fault.
        url, limits = self._server.url, httpx.Limits(max_connections=256, keepalive_expiry=1.0)
        admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
        async with (
            httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as self._client,
            httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, headers=admin) as self._admin,
        ):
            yield

    async def _warm_up(self, concurrency: int) -> None:
        """All requests one by one, then twice by all callers: what is allocated once, such as a
        thread for each caller and its malloc arena, is no leak."""
        for good in self._goods:
            await self._ask(good)
        waiting = iter(self._goods * 2)

        async def ask_the_next() -> None:
            for good in waiting:
                await self._ask(good)

        await asyncio.gather(*(ask_the_next() for _ in range(concurrency)))
        self.report.counts.clear()

    async def _caller(self, deadline: float) -> None:
        while self._num_left > 0 and time.monotonic() < deadline:
            await self._may_ask.wait()
            self._num_left -= 1
            if self._num_left % 500 == 0:
                print(f"{self._num_left} left, {len(self.report.problems)} problems", flush=True)
            sent_s = time.monotonic()
            self._num_asking += 1
            try:
                await self._one()
            except Exception as error:
                self.report.problem(f"lost: {type(error).__name__}: {error}")
            finally:
                self._num_asking -= 1
            self.report.slowest_s = max(self.report.slowest_s, time.monotonic() - sent_s)
            await asyncio.sleep(self._pause_s)

    async def _one(self) -> None:
        """One request of a random kind."""
        kind, good = self._draw.random(), self._draw.choice(self._goods)
        if kind < LEAVING:
            await self._leave_early(good)
        elif kind < BAD_ONES:
            await self._ask_badly()
        elif kind < TALKING:
            await self._talk(self._draw.choice(self._dialogues))
        elif kind < STREAMING and good.can_stream:
            await self._ask_streaming(good)
        else:
            await self._ask(good)

    async def _ask(self, good: Good) -> None:
        self.report.counts["whole"] += 1
        answer = await self._client.post(good.path, json=good.body)
        if answer.status_code != 200:
            self.report.problem(f"{answer.status_code}: {answer.text}")
            return
        choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
        texts = [one.get("text", one.get("message", {}).get("content")) for one in choices]
        self._compare(texts, good.texts, good.body)

    async def _ask_streaming(self, good: Good) -> None:
        self.report.counts["streamed"] += 1
        texts = [""] * len(good.texts)
        is_done = False
        async with self._stream(good) as answer:
            async for line in answer.aiter_lines():
                is_done |= line == "data: [DONE]"
                if not line.startswith("data: {"):
                    continue
                for choice in json.loads(line[6:]).get("choices", ()):
                    delta = choice.get("delta", {}).get("content") or choice.get("text") or ""
                    texts[choice["index"]] += delta
        if not is_done:
            self.report.problem("a stream ended without [DONE]")
        self._compare(texts, good.texts, good.body)

    def _stream(self, good: Good) -> Any:
        return self._client.stream("POST", good.path, json={**good.body, "stream": True})

    async def _leave_early(self, good: Good) -> None:
        """After some time, whatever has come by then, or after some pieces of the answer."""
        self.report.counts["left early"] += 1
        if self._draw.random() < 0.5 or not good.can_stream:
            work = self._client.post(good.path, json=good.body)
            await asyncio.wait({task := asyncio.ensure_future(work)}, timeout=self._draw.random())
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return
        num_lines = self._draw.randint(0, 20)
        async with self._stream(good) as answer:
            async for _ in answer.aiter_lines():
                num_lines -= 1
                if num_lines < 0:
                    return

    async def _ask_badly(self) -> None:
        self.report.counts["malformed"] += 1
        bad = self._draw.choice(BAD)
        answer = await self._client.post(
            bad.path, content=bad.content, headers={"Content-Type": "application/json"}
        )
        if answer.status_code not in bad.statuses or "message" not in answer.json()["error"]:
            self.report.problem(f"{bad.content[:80]!r} got {answer.status_code}: {answer.text}")

    async def _talk(self, dialogue: Dialogue) -> None:
        """A conversation resource, pinned between its turns, until it is deleted."""
        self.report.counts["dialogues"] += 1
        system = {"role": "system", "content": dialogue.system}
        made = await self._client.post("/v1/conversations", json={"messages": [system]})
        name = made.json()["id"]
        for turn, expected in zip(dialogue.turns, dialogue.answers, strict=True):
            body = {
                "messages": [{"role": "user", "content": turn}],
                "conversation": name,
                "temperature": 0,
                "max_completion_tokens": dialogue.max_tokens,
            }
            answer = await self._client.post("/v1/chat/completions", json=body)
            if answer.status_code != 200:
                self.report.problem(f"{answer.status_code}: {answer.text}")
                break
            text = answer.json()["choices"][0]["message"]["content"]
            self._compare([text], (expected,), body)
        await self._client.delete(f"/v1/conversations/{name}")

    def _compare(self, texts: list[Any], expected: tuple[str, ...], body: Any) -> None:
        if tuple(texts) != expected:
            self.report.problem(f"wrong: {texts} instead of {expected} for {body}")

    async def _play_with_memory(self, start_s: float) -> None:
        """Change the budget, empty the prefix cache, sleep and wake, for ever."""
        lull_s = start_s
        while True:
            for budget in BUDGETS:
                await asyncio.sleep(0.5)
                # 400: a request that runs may need more. 409: what is pinned does.
                await self._post("/admin/budget", {"kv_cache_memory": budget}, (200, 400, 409))
            await self._post("/admin/budget", {"kv_cache_memory": BUDGETS[0]})
            if time.monotonic() - lull_s > LULL_INTERVAL_S:
                lull_s = time.monotonic()
                async with self._lull(), self._asleep(2):
                    at_rest = (time.monotonic() - start_s, self._server.anonymous_bytes())
                    self.report.rests.append(at_rest)
            async with self._asleep(self._draw.choice((1, 2))):
                pass

    @asynccontextmanager
    async def _lull(self) -> AsyncIterator[None]:
        """No caller waits for an answer meanwhile."""
        self._may_ask.clear()
        try:
            while self._num_asking:
                await asyncio.sleep(0.05)
            yield
        finally:
            self._may_ask.set()

    @asynccontextmanager
    async def _asleep(self, level: int) -> AsyncIterator[None]:
        await self._post("/admin/reset_prefix_cache")
        try:
            await self._post("/admin/sleep", {"level": level})
            await asyncio.sleep(0.2)
            yield
        finally:
            await self._post("/admin/wake")

    async def _sample(self, start_s: float) -> None:
        while True:
            sizes = (self._server.anonymous_bytes(), self._server.pool_bytes())
            self.report.samples.append((time.monotonic() - start_s, *sizes))
            await asyncio.sleep(SAMPLE_INTERVAL_S)

    async def _post(self, path: str, body: Any = None, allowed: tuple[int, ...] = (200,)) -> Any:
        answer = await self._admin.post(path, json=body or {})
        self.report.counts[f"{path} {answer.status_code}"] += 1
        if answer.status_code not in allowed:
            self.report.problem(f"{path} got {answer.status_code}: {answer.text}")
        return answer.json()

    async def _counters(self) -> Any:
        async with self._clients():
            return counters((await self._client.get("/metrics")).text)

    async def _level(self) -> dict[str, int]:
        """What the server holds when it has nothing to do and all caches have been dropped.

        Asks again until nothing is left, for readers that have gone are noticed in their own time.
        """
        deadline = time.monotonic() + LEVEL_TIMEOUT_S
        kept = self.report.counts.copy()
        while True:
            async with self._clients():
                level = await self._drop_caches()
            level["open_files"] = self._server.num_files()
            is_low = not any(size for name, size in level.items() if name != "open_files")
            is_low &= level["open_files"] <= self.report.before.get("open_files", 1 << 30)
            if is_low or time.monotonic() > deadline:
                self.report.counts = kept
                return level
            await asyncio.sleep(0.3)

    async def _drop_caches(self) -> dict[str, int]:
        """Recorded prefixes by the reset, parked slots by a budget of nearly nothing, free chunks
        by sleep; then what the server says it holds, and what the kernel says."""
        await self._post("/admin/reset_prefix_cache")
        await self._post("/admin/budget", {"kv_cache_memory": SHIPPED_CHUNK_BYTES}, (200, 400, 409))
        await self._post("/admin/budget", {"kv_cache_memory": BUDGETS[0]})
        await self._post("/admin/sleep", {"level": 2})
        await self._post("/admin/wake")
        await asyncio.sleep(0.2)  # the map is made anew
        found = (await self._admin.get("/admin/memory")).json()
        engine, stats = found["engine"], found["stats"]
        level = {name: engine[name] for name in ("num_running", "num_waiting", "num_swapped")}
        level["num_vtensors"] = stats["num_vtensors"]
        for kind in ("resident", "mapped", "parked", "recorded", "swapped", "held"):
            level[f"{kind}_bytes"] = stats[f"{kind}_bytes"]
        level["referenced_chunks"] = len(found["chunks"])
        level["pool_bytes"] = self._server.pool_bytes()
        return level


async def _with_background(
    work: list[Coroutine[Any, Any, None]], background: list[Coroutine[Any, Any, None]]
) -> list[Exception]:
    """Returns when `work` is done; ends `background`, and says what has failed there. Raises what
    failed in `work`."""
    tasks = [asyncio.ensure_future(one) for one in background]
    await asyncio.gather(*work)
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    return [result for result in results if isinstance(result, Exception)]


def run(
    num_requests: int,
    concurrency: int,
    seconds: float | None,
    seed: int,
    pause_s: float = 0.0,
) -> SoakReport:
    with LLM(
        str(SHIPPED_MODEL), chunk_bytes=SHIPPED_CHUNK_BYTES, kv_cache_memory_bytes="32MiB"
    ) as llm:
        goods = make_good(llm, NUM_DISTINCT, seed)
        dialogues = make_dialogues(llm, NUM_DIALOGUES, seed)
    with soak_server(*SERVER) as server:
        soak = Soak(server, goods, dialogues, seed, pause_s)
        asyncio.run(soak.run(num_requests, concurrency, seconds))
    return soak.report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seconds", type=float, help="stop after this time")
    parser.add_argument("--hour", action="store_true", help="an hour, however many requests")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between a caller's two")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args()
    if options.hour:
        options.requests, options.seconds = sys.maxsize, 3600.0
    load_before = os.getloadavg()
    report = run(
        options.requests, options.concurrency, options.seconds, options.seed, options.pause
    )
    print(report.table())
    print("\n".join(report.problems[:20]) or "zero lost, zero wrong, nothing left behind")
    write_report(options.json, "soak", report.as_json(), load_before=load_before)
    sys.exit(bool(report.problems))


if __name__ == "__main__":
    main()
