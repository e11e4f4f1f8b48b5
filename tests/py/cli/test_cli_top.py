"""`flexinfer top`: what it reckons from two scrapes, and what it shows."""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry, generate_latest

from flexinfer.cli.app import app
from flexinfer.cli.top.sample import Sample, quantile_of
from flexinfer.cli.top.view import view
from flexinfer.engine.prometheus_families import engine_families
from flexinfer.metrics.requests import RequestStats
from flexinfer.metrics.steps import EngineStats, StepTotals
from flexinfer.outputs import RequestMetrics
from flexinfer.vtensor import KVSpec, VTensorManager
from helpers.stub_http_server import Reply, loopback


class Server:
    """The numbers of an engine that a test moves, and their exposition."""

    def __init__(self) -> None:
        spec = KVSpec(num_layers=2, num_kv_heads=1, head_dim=32, max_seq_len=256)
        self.manager = VTensorManager(spec, max_requests=4, memory_budget="1MiB", chunk_bytes=4096)
        self.requests = RequestStats()
        self.steps = StepTotals()
        self.running = 2

    def scrape(self, time_s: float) -> Sample:
        return Sample.parse(self.text(), time_s)

    def text(self) -> str:
        stats = EngineStats(
            num_running=self.running,
            num_waiting=3,
            num_swapped=0,
            is_sleeping=False,
            preemptions={"recompute": {"growth: cheaper": 2}, "swap": {"growth: cheaper": 1}},
            num_prefix_waits=0,
            num_promoted=0,
            extension_depth_tokens=1,
            steps=self.steps,
            memory=self.manager.stats(),
            requests=self.requests,
        )
        families = list(engine_families(stats, "tiny"))
        registry = CollectorRegistry()

        class Fixed:
            def collect(self) -> Any:
                return families

        registry.register(Fixed())  # type: ignore[arg-type]
        up = 'flexinfer:engine_up{model_name="tiny"} 1.0\nprocess_start_time_seconds 100.0\n'
        return generate_latest(registry).decode() + up

    def serve(self, num_tokens: int, gap_s: float) -> None:
        """One request of 10 prompt tokens."""
        metrics = RequestMetrics(arrival_time=0.0, first_scheduled_time=0.0)
        for idx in range(num_tokens):
            self.requests.note_tokens(metrics, 10, 1, (idx + 1) * gap_s)
        self.steps.num_steps += num_tokens


@pytest.fixture
def server() -> Any:
    server = Server()
    yield server
    server.manager.close()


def test_rates_are_of_the_time_between_two_looks(server: Server) -> None:
    server.serve(50, 0.01)
    before = server.scrape(200.0)
    server.serve(20, 0.01)
    now = server.scrape(204.0).numbers(before)
    assert now["generation_tokens_per_s"] == 5.0
    assert now["prompt_tokens_per_s"] == 2.5
    assert now["requests"] == {"running": 2, "waiting": 3, "swapped": 0}
    assert now["preemptions"] == 0


def test_the_first_look_is_of_all_the_time(server: Server) -> None:
    server.serve(50, 0.01)
    numbers = server.scrape(200.0).numbers(None)
    assert numbers["generation_tokens_per_s"] == 0.5
    assert numbers["preemptions"] == 3


def test_a_server_that_has_restarted_begins_anew(server: Server) -> None:
    server.serve(50, 0.01)
    before = server.scrape(200.0)
    again = Server()
    again.serve(20, 0.01)
    numbers = again.scrape(204.0).numbers(before)
    again.manager.close()
    assert numbers["generation_tokens_per_s"] == pytest.approx(20 / 104)


def test_latencies_are_of_the_time_between_too(server: Server) -> None:
    server.serve(50, 2.0)
    before = server.scrape(200.0)
    server.serve(50, 0.004)
    latency = server.scrape(201.0).numbers(before)["latency_s"]["inter_token"]
    assert 0.0025 <= latency["p50"] <= latency["p99"] <= 0.005


def test_memory_is_that_of_the_manager(server: Server) -> None:
    tokens = list(range(64))
    vtensors = [server.manager.create(tokens)]
    vtensors[0].extend(64)
    vtensors[0].record_prefix(tokens)
    vtensors.append(server.manager.create(tokens))
    numbers = server.scrape(1.0).numbers(None)
    stats = server.manager.stats()
    assert numbers["memory_bytes"]["shared"] == stats.shared_bytes > 0
    assert numbers["memory_bytes"]["saved"] == stats.saved_bytes
    assert numbers["prefix_hit_rate"] == stats.prefix_hit_tokens / stats.prefix_query_tokens


def test_mapping_time_is_summed_over_replicas(server: Server) -> None:
    """Real text has `engine` with every sample, and `replica` where there are several."""
    totals = 'flexinfer:mapping_time_seconds_total{engine="0",kind="%s",model_name="tiny"} '
    server.serve(50, 0.01)
    text = re.sub(r"(?m)^flexinfer:mapping_time_seconds_total.*\n", "", server.text())
    text += totals % "exposed" + "0.25\n" + totals % "hidden" + "0.5\n"
    replicas = [text.replace('engine="0"', f'engine="0",replica="{name}"') for name in "ab"]
    alone = Sample.parse(text, 200.0).numbers(None)
    several = Sample.parse("".join(replicas), 200.0).numbers(None)
    for numbers in (alone, several):
        assert numbers["exposed_us_per_step"] == 5000.0
        assert numbers["hidden_us_per_step"] == 10000.0


def test_a_quantile_lies_in_the_bucket_of_the_true_one() -> None:
    rng = random.Random(0)
    bounds = [0.1, 0.2, 0.5, 1.0, 2.0]
    for _ in range(100):
        values = sorted(rng.expovariate(2.0) for _ in range(rng.randint(1, 200)))
        counts = [
            (bound, float(sum(value <= bound for value in values))) for bound in (*bounds, math.inf)
        ]
        for quantile in (0.5, 0.9, 0.99):
            true = values[max(0, math.ceil(quantile * len(values)) - 1)]
            found = quantile_of(counts, quantile)
            assert found is not None
            edges = [0.0, *bounds]
            low = max(edge for edge in edges if edge < true)
            high = min((edge for edge in edges if edge >= true), default=edges[-1])
            assert low <= found <= high


def test_no_values_have_no_quantile() -> None:
    assert quantile_of([], 0.5) is None
    assert quantile_of([(1.0, 0.0), (math.inf, 0.0)], 0.5) is None


def test_the_view_shows_the_numbers(server: Server) -> None:
    server.serve(50, 0.01)
    before = server.scrape(200.0)
    server.serve(20, 0.01)
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(view(server.scrape(204.0), before))
    text = console.export_text()
    assert "tiny" in text
    assert "2 running, 3 waiting" in text
    assert "2 prompt, 5 generated" in text
    assert "budget 1.0 MiB" in text


@pytest.mark.parametrize("columns", ["20", "40", "80"])
def test_a_narrow_terminal_has_every_number(server: Server, columns: str) -> None:
    server.serve(50, 0.01)
    with loopback({"/metrics": Reply(server.text())}) as loop:
        arguments = ["top", "--url", loop.url, "--once"]
        plain = CliRunner().invoke(app, arguments, env={"COLUMNS": columns}).stdout
    text = " ".join(plain.split())
    assert "0 ended, 3 preempted" in text
    assert "512.0 KiB reserved" in text
    assert "saved by sharing" in text
    assert all(number in text for number in ("14.2", "22.8", "24.8"))


def test_once_and_json_are_for_scripts(server: Server) -> None:
    server.serve(5, 0.01)
    with loopback({"/metrics": Reply(server.text())}) as loop:
        plain = CliRunner().invoke(app, ["top", "--url", loop.url, "--once"])
        result = CliRunner().invoke(app, ["top", "--url", loop.url, "--once", "--json"])
    assert "running" in plain.stdout
    assert json.loads(result.stdout)["requests"]["running"] == 2


def test_the_live_view_ends_with_the_server(server: Server) -> None:
    replies = [Reply(server.text()), Reply(server.text()), Reply("gone", 503)]
    with loopback({"/metrics": replies}) as loop:
        arguments = ["top", "--url", loop.url, "--interval", "0.1", "--json"]
        result = CliRunner().invoke(app, arguments)
    assert len(result.stdout.splitlines()) == 1
    assert result.exit_code == 2
    assert "503" in result.stderr


def test_what_is_no_terminal_has_a_report_for_each_look(server: Server) -> None:
    replies = [Reply(server.text()), Reply(server.text()), Reply("gone", 503)]
    with loopback({"/metrics": replies}) as loop:
        result = CliRunner().invoke(app, ["top", "--url", loop.url, "--interval", "0.1"])
    titles = [line for line in result.stdout.splitlines() if line.startswith("tiny  serving")]
    assert len(titles) == 2
    assert "(since the start)" in titles[0]
    assert "(last 0." in titles[1]


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_it_ends_with_its_reader(server: Server, form: tuple[str, ...]) -> None:
    with loopback({"/metrics": Reply(server.text())}) as loop:
        command = [sys.executable, "-m", "flexinfer.cli", "top", "--url", loop.url]
        with subprocess.Popen(
            [*command, "--interval", "0.1", *form],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            try:
                assert process.stdout.readline()
                process.stdout.close()
                assert process.wait(60) == 1
                assert process.stderr.read() == ""
            finally:
                process.kill()


def test_metrics_of_another_server_are_refused() -> None:
    with loopback({"/metrics": Reply("vllm:num_requests_running 1.0\n")}) as loop:
        result = CliRunner().invoke(app, ["top", "--url", loop.url, "--once"])
    assert result.exit_code == 2
    assert "no metrics of flexinfer" in result.stderr
