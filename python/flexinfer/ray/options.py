"""ReplicaOptions: what is served by how many replicas, checked before any work."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexinfer.config import EngineConfig
from flexinfer.server.settings import ServerSettings

ROUTERS = {
    "cached-prefix": "flexinfer.ray.request_router.CachedPrefixRouter",
    "power-of-two": "ray.serve._private.request_router.PowerOfTwoChoicesRequestRouter",
    "prefix-affinity": "ray.serve.llm.request_router.PrefixCacheAffinityRouter",
}
"""Name -> class. Ours, and Ray's own."""
NEED_RAY = "replicas need Ray Serve: pip install 'flexinfer[ray]'"


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    engine: EngineConfig
    """Of each replica."""
    server: ServerSettings
    """Limits are those of each replica."""
    replicas: int = 1
    router: str = "cached-prefix"
    """One of ROUTERS, or `package.module.Class`: a RequestRouter of Ray's."""
    autoscaling_config: Mapping[str, Any] | None = None
    """Ray's, in place of `replicas`: min_replicas, max_replicas, target_ongoing_requests, ..."""
    ray_actor_options: Mapping[str, Any] | None = None
    """What Ray reserves for each replica: num_cpus, num_gpus, resources, runtime_env, ..."""

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError(f"replicas must be at least 1, got {self.replicas}")
        if self.autoscaling_config is not None and self.replicas != 1:
            raise ValueError("replicas and autoscaling_config exclude each other")
        if self.router not in ROUTERS and "." not in self.router:
            known = ", ".join(ROUTERS)
            raise ValueError(f"router must be {known} or package.module.Class, got {self.router!r}")
        for name, (is_given, why) in self._refused().items():
            if is_given:
                raise ValueError(f"{name} cannot be combined with replicas: {why}")

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> ReplicaOptions:
        """From a file: `engine` and `server` are mappings of their fields. Raises ValueError."""
        _check_names(args, cls, "")
        engine = _make(EngineConfig, args.get("engine") or {}, "engine.")
        given = dict(args.get("server") or {})
        given.setdefault("served_model_names", [Path(str(engine.model)).name])
        if given.get("trace_dir") is not None:
            given["trace_dir"] = Path(given["trace_dir"])
        server = _make(ServerSettings, given, "server.")
        return cls(**{**args, "engine": engine, "server": server})

    def _refused(self) -> dict[str, tuple[bool, str]]:
        """What one process has and several have not: whether it is asked for, and why not."""
        engine, server, default = self.engine, self.server, ServerSettings
        reads = "Serve's proxies read and write for the clients"
        return {
            "kv_events_config": (
                engine.kv_events_config is not None,
                "all replicas would publish at the same endpoint",
            ),
            "role": (
                engine.role != "both" or server.role != "both",
                "KV is handed over between two servers of one machine",
            ),
            "tls": (server.tls is not None, "certificates are for Serve's http_options"),
            "send_timeout": (server.send_timeout_s != default.send_timeout_s, reads),
            "receive_timeout": (server.receive_timeout_s != default.receive_timeout_s, reads),
        }


def _make(kind: Any, given: Mapping[str, Any], where: str) -> Any:
    _check_names(given, kind, where)
    if "model" not in given and kind is EngineConfig:
        raise ValueError("engine.model is missing: a folder, a GGUF file or a hub id")
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})


def _check_names(given: Mapping[str, Any], kind: Any, where: str) -> None:
    known = {field.name for field in dataclasses.fields(kind)}
    for name in given:
        if name not in known:
            raise ValueError(f"{where}{name} is not known; known: {', '.join(sorted(known))}")
