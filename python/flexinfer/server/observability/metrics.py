"""GET /metrics: the engine's numbers for Prometheus, and how many HTTP requests had what answer.

A scrape asks the engine between two steps, once; nothing is counted in the request path but the
HTTP answers. Each app has a registry of its own, so that several may live in one process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

from fastapi import Request, Response
from prometheus_client import CollectorRegistry, Counter, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import ALLOWUTF8

from flexinfer.engine.prometheus_families import PREFIX, Maker, engine_families
from flexinfer.errors import EngineDeadError
from flexinfer.server.observability.handover_families import handover_families

if TYPE_CHECKING:
    from fastapi import FastAPI

    from flexinfer.async_llm import AsyncLLM
    from flexinfer.metrics.steps import EngineStats
    from flexinfer.server.handover.stats import HandoverStats

logger = logging.getLogger(__name__)

SCRAPE_TIMEOUT_S = 5.0
"""A step that takes longer than this leaves a scrape with the numbers of the one before."""


class EngineCollector:
    """The engine's numbers as of the last `refresh`. Used from one event loop."""

    def __init__(
        self, engine: AsyncLLM, model_name: str, handover: HandoverStats | None = None
    ) -> None:
        self._engine = engine
        self._handover = handover
        self._model_name = model_name
        self._stats: EngineStats | None = None

    async def refresh(self) -> None:
        """Ask the engine; without an answer in time the numbers stay as they are."""
        asked = asyncio.ensure_future(self._engine.call(lambda engine: engine.stats()))
        try:
            self._stats = await asyncio.wait_for(asked, SCRAPE_TIMEOUT_S)
        except TimeoutError:
            logger.warning(
                "the engine sent no statistics within %.0f s: a long step", SCRAPE_TIMEOUT_S
            )
        except EngineDeadError:
            logger.debug("the engine has stopped: its last statistics stay")

    def collect(self) -> Iterable[Metric]:
        yield Maker(self._model_name).gauge(
            "engine_up", "1: the engine serves.", self._engine.is_running
        )
        if self._handover is not None:
            yield from handover_families(self._handover, Maker(self._model_name))
        if self._stats is not None:
            yield from engine_families(self._stats, self._model_name)

    def describe(self) -> Iterable[Metric]:
        """The names are not known before the first `refresh`."""
        return ()


class HttpCounter:
    """ASGI middleware: counts answers by method, route and status."""

    def __init__(self, app: Any, counter: Counter) -> None:
        self._app = app
        self._counter = counter

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500  # if the app fails before it answers

        async def note_status(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note_status)
        finally:
            # The route's template, not the path: a caller must not be able to make up labels.
            route = getattr(scope.get("route"), "path", "none")
            self._counter.labels(scope["method"], route, str(status)).inc()


# No closure: FastAPI keeps endpoints for ever, and one that knows the engine keeps it too.
async def metrics(request: Request) -> Response:
    registry, collector = request.app.state.metrics
    await collector.refresh()
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    # Prometheus 2 does not ask for an escaping, and would get flexinfer_... by default. Colons are
    # valid in names of all versions: there is nothing to escape.
    body = cast("Callable[..., bytes]", encode)(registry, escaping=ALLOWUTF8)
    return Response(body, headers={"content-type": content_type})


def register_metrics(
    app: FastAPI, engine: AsyncLLM, model_name: str = "", handover: HandoverStats | None = None
) -> None:
    """Add GET /metrics to `app`, and the counting of its answers.

    Called after all other middleware was added, it counts what that refuses too.
    """

    registry = CollectorRegistry(auto_describe=False)
    collector = EngineCollector(engine, model_name, handover)
    registry.register(collector)
    ProcessCollector(registry=registry)
    counter = Counter(
        f"{PREFIX}http_requests",
        "HTTP requests answered.",
        ["method", "path", "status"],
        registry=registry,
    )
    app.add_middleware(HttpCounter, counter=counter)

    app.state.metrics = registry, collector
    app.add_api_route(
        "/metrics",
        metrics,
        methods=["GET"],
        tags=["operations"],
        summary="Numbers for Prometheus",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
