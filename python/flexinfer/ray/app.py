"""The Serve application: a gateway before deployments of engines. Ray does the cluster's work."""

from __future__ import annotations

import importlib
from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import Any

from starlette.types import ASGIApp, Message

from flexinfer.ray.calls import Call, ReplicaLostError
from flexinfer.ray.gateway import Gateway
from flexinfer.ray.options import NEED_RAY, ROUTERS, ReplicaOptions
from flexinfer.server.http.errors import APIError
from flexinfer.server.settings import ServerSettings

try:
    from ray import serve
    from ray.exceptions import RayActorError
    from ray.serve.exceptions import DeploymentUnavailableError

    from flexinfer.ray.named_replicas import with_names
    from flexinfer.ray.replica_process import ReplicaProcess
except ImportError as error:
    raise ModuleNotFoundError(f"{NEED_RAY} ({error})", name="ray") from None

GATEWAY_REQUESTS = 100_000
"""Replicas have bounds of their own; Serve's default is 5."""
HEALTH_PERIOD_S = 2.0
RETRY = {"Retry-After": "1"}


class GatewayDeployment:
    """In its process Serve's router runs, and chooses a replica for each call."""

    def __init__(self, replicas: Any, settings: ServerSettings) -> None:
        self._replicas = replicas
        self._answers = replicas.options(method_name="answer", stream=True)
        self._settings = settings

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return Gateway(self._forward, self._ask_all, self._settings)

    async def _forward(self, call: Call) -> AsyncGenerator[Message, None]:
        messages = self._answers.remote(call)
        try:
            async for message in messages:
                if message["type"] == "http.response.start":
                    call.on_answer()
                yield message
        except RayActorError as error:
            raise ReplicaLostError(str(error).partition("\n")[0]) from None
        finally:
            messages.cancel()

    async def _ask_all(self, method: str, *arguments: Any) -> Sequence[Awaitable[tuple[str, Any]]]:
        try:
            asked = self._replicas.broadcast(method, *arguments)
            # `results_async` gives all answers or, where one hangs, none: until Serve gives each.
            answers = await asked._fetch_replica_results_async()
        except DeploymentUnavailableError:
            reason = "no replica is there to be asked: Ray starts others; try again"
            raise APIError(503, reason, code="no_replica", headers=RETRY) from None
        return [answer.get_async() for answer in answers]


def build(options: ReplicaOptions) -> Any:
    """Raises ImportError for a router whose package is not installed."""
    engine, settings = options.engine, options.server
    num_ranks = engine.tensor_parallel_size
    actor: dict[str, Any] = {"num_cpus": num_ranks * (engine.threads or 1)}
    if str(engine.device or "").startswith("cuda"):
        actor["num_gpus"] = num_ranks
    actor.update(options.ray_actor_options or {})
    scaling: dict[str, Any] = {"num_replicas": options.replicas}
    if options.autoscaling_config is not None:
        scaling = {"autoscaling_config": dict(options.autoscaling_config)}
    replicas = serve.deployment(ReplicaProcess).options(
        name="replicas",
        **scaling,
        max_ongoing_requests=engine.max_num_seqs + settings.max_queue_len + 1,
        request_router_config=with_names(router_class(options)),
        logging_config={"enable_access_log": False},  # replicas have their own
        health_check_period_s=HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=settings.shutdown_timeout_s,
        ray_actor_options=actor,
    )
    gateway = serve.deployment(serve.ingress()(GatewayDeployment)).options(
        name="gateway",
        num_replicas=1,
        max_ongoing_requests=GATEWAY_REQUESTS,
        graceful_shutdown_timeout_s=settings.shutdown_timeout_s,
        logging_config={"enable_access_log": False},
        ray_actor_options={"num_cpus": 0},
    )
    return gateway.bind(replicas.bind(engine, settings), settings)


def router_class(options: ReplicaOptions) -> str:
    """The path of the class, which is there."""
    path = ROUTERS.get(options.router, options.router)
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise ImportError(f"the router {options.router!r} cannot be loaded: {error}") from None
    if found is None:
        raise ImportError(f"the router {options.router!r}: {module} has no {name}")
    return path
