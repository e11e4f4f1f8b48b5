"""What is asked of replicas is checked before any work, by name."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from flexinfer.cli.app import app
from flexinfer.ray import build_app
from flexinfer.ray.options import ReplicaOptions

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "replicas" / "serve.yaml"
ENGINE = {"model": "somewhere/tiny"}


def refusal(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 2, result.output
    return result.output


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({}, "engine.model is missing"),
        ({"engine": ENGINE, "replica": 2}, "replica is not known"),
        ({"engine": {**ENGINE, "modle": 1}}, "engine.modle is not known"),
        ({"engine": ENGINE, "server": {"api_key": []}}, "server.api_key is not known"),
        ({"engine": ENGINE, "replicas": 0}, "at least 1"),
        ({"engine": ENGINE, "replicas": 2, "autoscaling_config": {}}, "exclude each other"),
        ({"engine": ENGINE, "router": "fastest"}, "router must be cached-prefix"),
        ({"engine": ENGINE, "server": {"send_timeout_s": 5}}, "send_timeout cannot"),
    ],
)
def test_what_cannot_be_is_refused_by_name(args: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build_app(args)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ray-address", "auto"], "--ray-address needs --replicas"),
        (["--router", "power-of-two"], "--router needs --replicas"),
        (["--replicas", "0", "--port", "1"], "at least 1"),
        (["--replicas", "2", "--port", "0"], "port 0"),
        (["--replicas", "2", "--log-format", "json"], "log_format"),
        (["--replicas", "2", "--ray-actor-options", "[]"], "JSON object"),
        (["--replicas", "2", "--role", "decode", "--handover-socket", "/tmp/kv"], "role cannot"),
        (["--replicas", "2", "--kv-events-config", '{"enable_kv_cache_events": true}'], "kv_ev"),
    ],
)
def test_the_command_refuses_too(arguments: list[str], said: str) -> None:
    assert said in refusal(*arguments)


def test_an_adapter_that_is_not_there_is_told_before_a_cluster_starts() -> None:
    said = refusal("--replicas", "2", "--enable-lora", "--lora-modules", "other=/nowhere/adapter")
    assert "there is no such folder" in said


def test_a_port_in_use_is_told_before_a_cluster_starts() -> None:
    pytest.importorskip("ray", reason="replicas need Ray: make test-replicas installs it")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = CliRunner().invoke(app, ["serve", "--replicas", "2", "--port", str(port)])
    assert said.exit_code != 0
    assert f"{port}" in said.output
    assert "in use" in said.output


def test_serve_gets_what_is_asked_for() -> None:
    """Autoscaling as it was given; the cores of all ranks, unless others are named."""
    pytest.importorskip("ray", reason="replicas need Ray: make test-replicas installs it")
    scaling = {"min_replicas": 1, "max_replicas": 3, "target_ongoing_requests": 7}
    engine = {**ENGINE, "threads": 3, "tensor_parallel_size": 2, "device": "cuda"}
    args = {"engine": engine, "autoscaling_config": scaling}
    for actor, cores in ({}, 6), ({"num_cpus": 1.5}, 1.5):
        gateway = build_app({**args, "ray_actor_options": actor})
        replicas = gateway._bound_deployment.init_args[0]._bound_deployment
        found = replicas._deployment_config.autoscaling_config
        assert {name: getattr(found, name) for name in scaling} == scaling
        assert (replicas.ray_actor_options["num_cpus"], cores) == (cores, cores)
        assert replicas.ray_actor_options["num_gpus"] == 2


def test_cores_and_memory_are_divided_among_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from flexinfer.ray import run

    monkeypatch.setattr("os.cpu_count", lambda: 12)
    monkeypatch.setattr("flexinfer.vtensor.available_memory_bytes", lambda: 24 << 20)
    given = {"engine": {**ENGINE, "tensor_parallel_size": 2}, "replicas": 3}
    engine = run._shared(ReplicaOptions.from_args(given)).engine
    assert (engine.threads, engine.kv_cache_memory_bytes) == (2, 2 << 20)


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'flexinfer[ray]'" in refusal("--replicas", "2")
    monkeypatch.delitem(sys.modules, "flexinfer.ray.app", raising=False)
    with pytest.raises(ImportError, match=r"flexinfer\[ray\]"):
        build_app({"engine": ENGINE})


def test_the_example_is_understood() -> None:
    (application,) = yaml.safe_load(EXAMPLE.read_text())["applications"]
    options = ReplicaOptions.from_args(application["args"])
    assert application["import_path"] == "flexinfer.ray:build_app"
    assert options.server.model_name == options.engine.model
    assert options.autoscaling_config is not None
