"""GET /metrics says what the engine did, under the names of the documentation and the dashboard."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")

from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from flexinfer import AsyncLLM, SamplingParams
from flexinfer.engine import prometheus_families as families_module
from flexinfer.engine.prometheus_families import Maker
from flexinfer.scheduler.preemption import all_counts
from flexinfer.server.handover.stats import HandoverStats
from flexinfer.server.observability.handover_families import handover_families
from flexinfer.server.observability.metrics import register_metrics
from helpers.tiny_models import make_model, random_prompts

ROOT = Path(__file__).resolve().parents[3]
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
Fetch = Callable[..., Awaitable[str]]


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[tuple[AsyncLLM, Fetch]]:
    """An app with /metrics and one more route; `fetch(path)` gives the text of an answer."""
    defaults: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": "16MiB",
        "chunk_bytes": 4096,
        "enable_pre_extend": False,
    }
    llm = AsyncLLM(make_model("llama"), **{**defaults, **settings})
    app = FastAPI()
    app.add_api_route("/items/{number}", lambda number: number)
    app.add_api_route("/broken", lambda: 1 / 0)
    register_metrics(app, llm, "tiny")
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:

        async def fetch(path: str, accept: str = "*/*") -> str:
            text: str = (await client.get(path, headers={"Accept": accept})).text
            return text

        try:
            yield llm, fetch
        finally:
            await asyncio.to_thread(llm.shutdown)


async def answer(llm: AsyncLLM, prompt: list[int], max_tokens: int) -> int:
    """How many tokens of the prompt were found recorded."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    *_, last = [output async for output in llm.generate(prompt, params)]
    return last.num_cached_tokens or 0


def parse(text: str) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for item in family.samples:
            of_all = {"model_name", "engine"}
            labels = frozenset((k, v) for k, v in item.labels.items() if k not in of_all)
            found[item.name, labels] = item.value
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"flexinfer:{name}", frozenset(labels.items())]


def test_the_numbers_are_those_of_known_requests() -> None:
    first, second = random_prompts((40, 24))

    async def run() -> tuple[Samples, int]:
        async with serving() as (llm, fetch):
            cached = await answer(llm, first, 6)
            cached += await answer(llm, second, 4)
            cached += await answer(llm, [*first, 1, 2, 3], 5)
            return parse(await fetch("/metrics")), cached

    found, cached = run_and(run)
    assert cached >= 40
    assert value(found, "prompt_tokens_total") == 40 + 24 + 43
    assert value(found, "generation_tokens_total") == 6 + 4 + 5
    assert value(found, "request_success_total", finished_reason="length") == 3
    assert value(found, "request_success_total", finished_reason="error") == 0
    assert value(found, "prefix_cache_hits_total") == cached
    assert value(found, "computed_tokens_total", phase="prefill") == 40 + 24 + 43 - cached
    assert value(found, "computed_tokens_total", phase="decode") == 5 + 3 + 4
    assert value(found, "inter_token_latency_seconds_count") == 5 + 3 + 4
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert value(found, f"{name}_seconds_count") == 3
    assert value(found, "request_prompt_tokens_sum") == 107
    assert value(found, "request_generation_tokens_bucket", le="5.0") == 2
    assert value(found, "num_requests_running") == value(found, "num_requests_waiting") == 0
    assert value(found, "engine_up") == 1


def test_the_memory_is_that_of_the_manager() -> None:
    async def run() -> tuple[Samples, Any]:
        async with serving() as (llm, fetch):
            await answer(llm, random_prompts((60,))[0], 6)
            await llm.call(lambda engine: engine.manager.drain())
            found = parse(await fetch("/metrics"))
            return found, (await llm.call(lambda engine: engine.stats())).memory

    found, memory = run_and(run)
    for kind in families_module.MEMORY_BYTES:
        assert value(found, f"kv_cache_{kind}_bytes") == getattr(memory, f"{kind}_bytes")
    for kind in families_module.CHUNK_TOTALS:
        assert value(found, f"chunks_{kind}_total") == getattr(memory, f"chunks_{kind}")
    calls = {kind: entry.calls for kind, entry in memory.driver_calls.items()}
    assert {kind: value(found, "driver_calls_total", call=kind) for kind in calls} == calls
    assert calls["create"] > 0
    used = 1 - memory.available_bytes / memory.budget_bytes
    assert value(found, "kv_cache_usage_perc") == pytest.approx(used)
    exposed, hidden = memory.map_us_exposed / 1e6, memory.map_us_hidden / 1e6
    assert value(found, "mapping_time_seconds_total", kind="exposed") == pytest.approx(exposed)
    assert value(found, "mapping_time_seconds_total", kind="hidden") == pytest.approx(hidden)
    assert exposed != hidden


def test_histograms_are_cumulative_and_end_with_all_values() -> None:
    async def run() -> str:
        async with serving() as (llm, fetch):
            for prompt in random_prompts((8, 16, 24)):
                await answer(llm, prompt, 4)
            return await fetch("/metrics")

    histograms = [
        family
        for family in text_string_to_metric_families(run_and(run))
        if family.type == "histogram"
    ]
    assert len(histograms) == len(families_module.LATENCIES) + 1  # and tokens per step
    for family in histograms:
        counts = [s.value for s in family.samples if s.name.endswith("_bucket")]
        (total,) = (s.value for s in family.samples if s.name.endswith("_count"))
        assert counts == sorted(counts)
        assert counts[-1] == total > 0


def test_preemptions_are_counted_by_mode_and_reason() -> None:
    async def run() -> tuple[Samples, Any]:
        settings = {"kv_cache_memory_bytes": "400KiB", "max_model_len": 256}
        async with serving(**settings) as (llm, fetch):
            prompts = random_prompts((100, 101, 102, 103))
            await asyncio.gather(*(answer(llm, prompt, 80) for prompt in prompts))
            found = parse(await fetch("/metrics"))
            return found, await llm.call(lambda engine: engine.stats().preemptions)

    found, preemptions = run_and(run)
    expected = {
        (mode, reason): count
        for mode, reasons in preemptions.items()
        for reason, count in reasons.items()
    }
    assert sum(expected.values()) > 0
    assert set(expected) <= set(all_counts())
    for (mode, reason), count in (all_counts() | expected).items():
        assert value(found, "num_preemptions_total", mode=mode, reason=reason) == count


def test_counters_with_labels_begin_at_zero_and_not_with_their_first_event() -> None:
    async def run() -> Samples:
        async with serving() as (_, fetch):
            return parse(await fetch("/metrics"))

    found = run_and(run)
    for mode, reason in all_counts():
        assert value(found, "num_preemptions_total", mode=mode, reason=reason) == 0
    for reason in families_module.FINISH_REASONS:
        assert value(found, "request_success_total", finished_reason=reason) == 0
    assert value(found, "driver_calls_total", call="unmap") == 0


def test_answers_are_counted_by_route_and_not_by_path() -> None:
    async def run() -> Samples:
        async with serving() as (_, fetch):
            for path in ("/items/1", "/items/2", "/nowhere", "/elsewhere"):
                await fetch(path)
            with pytest.raises(ZeroDivisionError):
                await fetch("/broken")
            return parse(await fetch("/metrics"))

    found = run_and(run)
    labels = {"method": "GET", "path": "/items/{number}", "status": "200"}
    assert value(found, "http_requests_total", **labels) == 2
    labels = {"method": "GET", "path": "none", "status": "404"}
    assert value(found, "http_requests_total", **labels) == 2
    labels = {"method": "GET", "path": "/broken", "status": "500"}
    assert value(found, "http_requests_total", **labels) == 1


def test_the_last_numbers_outlive_the_engine() -> None:
    async def run() -> Samples:
        async with serving() as (llm, fetch):
            await answer(llm, [1, 2, 3], 4)
            await fetch("/metrics")
            await asyncio.to_thread(llm.shutdown)
            return parse(await fetch("/metrics"))

    found = run_and(run)
    assert value(found, "engine_up") == 0
    assert value(found, "generation_tokens_total") == 4


def test_a_step_that_takes_long_does_not_hold_up_a_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    monkeypatch.setattr("flexinfer.server.observability.metrics.SCRAPE_TIMEOUT_S", 0.01)
    release = threading.Event()

    async def run() -> Samples:
        async with serving() as (llm, fetch):
            busy = asyncio.ensure_future(llm.call(lambda _: release.wait()))
            try:
                return parse(await fetch("/metrics"))
            finally:
                release.set()
                await busy

    assert value(run_and(run), "engine_up") == 1


def test_several_apps_live_in_one_process() -> None:
    async def run() -> None:
        async with serving() as (_, fetch), serving() as (_, other):
            await fetch("/items/1")
            assert 'path="/items/{number}"' in await fetch("/metrics")
            assert 'path="/items/{number}"' not in await other("/metrics")

    run_and(run)


@pytest.fixture(scope="module")
def names() -> set[str]:
    """Names of all series that a fresh server exposes, and of families that have none yet."""

    async def run() -> str:
        async with serving() as (_, fetch):
            return await fetch("/metrics")

    found = set()
    for family in text_string_to_metric_families(run_and(run)):
        suffix = "_total" if family.type == "counter" else ""
        found |= {family.name + suffix, *(item.name for item in family.samples)}
    return found


def test_the_dashboard_names_only_metrics_that_exist(names: set[str]) -> None:
    board = json.loads((ROOT / "dashboards" / "grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    used = {name for query in queries for name in re.findall(r"flexinfer:\w+", query)}
    assert len(queries) > 20
    assert len(used) > 20
    assert used <= names


@pytest.mark.parametrize(
    "accept",
    [
        "text/plain;version=0.0.4",
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1",
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8",
        "text/plain;version=1.0.0;escaping=underscores",
    ],
    ids=["text", "prometheus-2", "prometheus-3", "escaped"],
)
def test_names_are_the_same_whatever_a_scraper_asks_for(accept: str) -> None:
    async def run() -> str:
        async with serving() as (_, fetch):
            return await fetch("/metrics", accept)

    lines = run_and(run).splitlines()
    assert [line for line in lines if line.startswith("flexinfer:engine_up{")]
    assert not [line for line in lines if line.startswith("flexinfer_")]


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    board = json.loads((ROOT / "dashboards" / "grafana.json").read_text())
    cells = [
        (x, y)
        for panel in board["panels"]
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_every_metric_is_documented_and_no_other(names: set[str]) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    documented = set(re.findall(r"^\| `(flexinfer:\w+)`", text, re.MULTILINE))
    suffixes = ("_bucket", "_count", "_sum", "_created")
    exposed = {n for n in names if n.startswith("flexinfer:") and not n.endswith(suffixes)}
    stats = handover_families(HandoverStats(), Maker("model"))
    handover = {f"{family.name}_total" for family in stats}
    assert handover < documented  # of servers with a role
    speculation = {name for name in documented if name.startswith("flexinfer:spec_decode_")}
    assert len(speculation) == 4  # not of this server
    assert documented - speculation - handover == exposed


def run_and(run: Callable[[], Any]) -> Any:
    return asyncio.run(run())
