"""examples/replicas/serve.yaml, deployed: as it is, but for the model and its sizes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import yaml

pytest.importorskip("ray", reason="replicas need Ray: make test-replicas installs it")
pytestmark = pytest.mark.slow

from flexinfer.cli.settings import SHIPPED_CHUNK_BYTES, SHIPPED_MODEL
from helpers.free_port import free_port
from helpers.ray_cluster import RayCluster, ray_cluster
from helpers.replica_servers import ask, client_of, processes
from helpers.waiting import until

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "replicas" / "serve.yaml"
CPUS = 3


def small(port: int) -> dict[str, Any]:
    """The example, for this machine; it scales up at once."""
    config: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    config["http_options"]["port"] = port
    (application,) = config["applications"]
    args = application["args"]
    sizes = {"kv_cache_memory_bytes": "64MiB", "chunk_bytes": SHIPPED_CHUNK_BYTES, "threads": 1}
    args["engine"] = {**args["engine"], "model": str(SHIPPED_MODEL), **sizes}
    args["server"]["served_model_names"] = ["tiny_chat"]
    scaling = {"target_ongoing_requests": 1, "upscale_delay_s": 0.1, "metrics_interval_s": 0.5}
    args["autoscaling_config"] |= scaling
    args["ray_actor_options"] = {"num_cpus": 1}
    return config


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(CPUS) as made:
        yield made


def test_it_is_deployed_scales_and_ends(cluster: RayCluster, tmp_path: Path) -> None:
    port = free_port()
    file = tmp_path / "serve.yaml"
    config = small(port)
    file.write_text(yaml.safe_dump(config))
    cluster.serve("deploy", str(file))
    url = f"http://127.0.0.1:{port}"
    until(lambda: is_ready(url), "the application")
    client = client_of(url)
    assert ask(client, "Hello").choices[0].message.content
    (first,) = processes(url).values()
    deployed = yaml.safe_load(cluster.serve("config"))["args"]
    assert deployed["autoscaling_config"] == config["applications"][0]["args"]["autoscaling_config"]
    seen: set[int] = set()

    def has_scaled() -> bool:
        asking = [threading.Thread(target=ask_long, args=(client,)) for _ in range(4)]
        for one in asking:
            one.start()
        for one in asking:
            one.join()
        seen.update(processes(url).values())
        return len(seen) >= 2

    until(has_scaled, "a second replica, for the load")
    assert first in seen
    cluster.serve("shutdown", "-y")
    until(lambda: not any(map(psutil.pid_exists, seen)), "all replicas to end")


def is_ready(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/ready", timeout=60).is_success
    return False


def ask_long(client: openai.OpenAI) -> None:
    ask(client, "Go", max_tokens=400, extra_body={"ignore_eos": True})
