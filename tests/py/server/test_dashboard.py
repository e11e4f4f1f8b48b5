"""The Grafana dashboard against a real Prometheus that scrapes a real server.

`prometheus` and `promtool` are Debian's package `prometheus`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers.free_port import free_port
from helpers.serving import MODEL, ServerProcess

PROMETHEUS = shutil.which("prometheus")
PROMTOOL = shutil.which("promtool")
BOARD = Path(__file__).parents[3] / "dashboards" / "grafana.json"
LOAD_S = 6
NOT_YET = "flexinfer:num_preemptions_total"
"""Has no series before the first preemption: its labels say how it came about."""


def expressions() -> list[str]:
    """What the panels ask, with Grafana's variables as it would fill them in."""
    board = json.loads(BOARD.read_text())
    return [
        target["expr"].replace("$__rate_interval", "10s").replace("$model", ".*")
        for panel in board["panels"]
        for target in panel.get("targets", ())
    ]


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool: apt-get install prometheus")
def test_prometheus_can_parse_every_expression(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yml"
    found = [
        {"record": f"panel:{i}", "expr": expression} for i, expression in enumerate(expressions())
    ]
    rules.write_text(json.dumps({"groups": [{"name": "panels", "rules": found}]}))
    command = [str(PROMTOOL), "check", "rules", str(rules)]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(found)} rules found" in checked.stdout


@pytest.fixture
def prometheus(server: ServerProcess, tmp_path: Path) -> Iterator[httpx.Client]:
    """Scrapes the server every second."""
    if PROMETHEUS is None:
        pytest.skip("no prometheus: apt-get install prometheus")
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [
            {
                "job_name": "flexinfer",
                "static_configs": [{"targets": [server.url.removeprefix("http://")]}],
            }
        ],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    address = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [
            PROMETHEUS,
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address={address}",
        ],
        stderr=subprocess.DEVNULL,
    )
    try:
        with httpx.Client(base_url=f"http://{address}", trust_env=False) as client:
            wait_until_it_scrapes(client)
            yield client
    finally:
        process.terminate()
        process.wait()


def results(client: httpx.Client, expression: str) -> list[Any]:
    answer = client.get("/api/v1/query", params={"query": expression}).json()
    assert answer["status"] == "success", (expression, answer)
    found: list[Any] = answer["data"]["result"]
    return found


def wait_until_it_scrapes(client: httpx.Client) -> None:
    """Prometheus looks for targets five seconds after its start."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with suppress(httpx.TransportError, ValueError):
            if results(client, "up == 1"):
                return
        time.sleep(0.2)
    raise AssertionError("prometheus does not scrape")


@pytest.mark.slow
def test_every_panel_has_data(prometheus: httpx.Client, server: ServerProcess) -> None:
    end = time.monotonic() + LOAD_S
    while time.monotonic() < end:
        body = {"model": MODEL, "prompt": "Hello! My name is Ada.", "max_tokens": 12}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()
        time.sleep(0.1)
    empty = [one for one in expressions() if not results(prometheus, one)]
    assert [one for one in empty if NOT_YET not in one] == []
