"""create_app: all endpoints, limits and errors as one FastAPI app over one AsyncLLM."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.middleware.cors import CORSMiddleware

from flexinfer.async_llm import AsyncLLM
from flexinfer.server.api import (
    adapters,
    admin,
    chat,
    completions,
    conversations,
    docs_page,
    health,
    messages,
    models,
    responses,
    sleep,
    tokenize,
)
from flexinfer.server.api.page import mount_page
from flexinfer.server.http.auth import ADMIN_PATHS, KEYED_PREFIXES, AuthMiddleware
from flexinfer.server.http.errors import install_error_handlers
from flexinfer.server.http.hosts import HostMiddleware
from flexinfer.server.http.limits import BodyLimitMiddleware
from flexinfer.server.http.root_path import RootPathMiddleware
from flexinfer.server.observability.logs import AccessLogMiddleware
from flexinfer.server.observability.metrics import register_metrics
from flexinfer.server.observability.tracing import TraceContextMiddleware
from flexinfer.server.protocol.base import ErrorResponse
from flexinfer.server.protocol.messages import MessagesError
from flexinfer.server.settings import ServerSettings
from flexinfer.server.state import ServerState

ROUTERS = (
    health,
    models,
    chat,
    completions,
    responses,
    messages,
    conversations,
    tokenize,
    adapters,
    admin,
    sleep,
)
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": description}
    for status, description in {
        400: "what is wrong with the request",
        401: "no key, or a wrong one",
        403: "not allowed here",
        404: "not found",
        409: "not possible at the moment",
        413: "the body is too large",
        429: "too many requests; Retry-After says when to try again",
        500: "a failure here",
        503: "not serving at the moment",
    }.items()
}
ANTHROPIC_ERRORS = {status: {**one, "model": MessagesError} for status, one in ERRORS.items()}


def create_app(llm: AsyncLLM, settings: ServerSettings, replica: str | None = None) -> FastAPI:
    """The app. It does not own the engine: its maker shuts it down. `replica`: its name among
    several; None: a server alone."""
    _hush_pydantic()
    state = ServerState(llm, settings, replica)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with nullcontext() if state.prefiller is None else state.prefiller.serving():
            yield
        state.is_draining = True
        if state.partner is not None:
            state.partner.close()
        if state.tracer is not None:
            await asyncio.to_thread(state.tracer.shutdown)

    app = FastAPI(
        title="FlexInfer",
        version=version("flexinfer"),
        summary="OpenAI-compatible serving on vTensors",
        lifespan=lifespan,
        redoc_url=None,
        docs_url=None,
        servers=[{"url": settings.root_path}] if settings.root_path else None,
        openapi_url=None,  # made on the loop, which it would hold for a second: see docs_page
    )
    app.state.flexinfer = state
    install_error_handlers(app)
    app.router.routes.extend(module.FAST_ROUTE for module in (completions, chat))
    for module in ROUTERS:
        errors = ANTHROPIC_ERRORS if module is messages else ERRORS
        app.include_router(module.router, responses=errors)
    mount_page(app)
    app.include_router(docs_page.router)
    # The last one added sees a request first.
    app.add_middleware(BodyLimitMiddleware, max_bytes=settings.max_request_bytes)
    app.add_middleware(
        AuthMiddleware, api_keys=settings.api_keys, admin_api_key=settings.admin_api_key
    )
    if settings.checks_hosts:
        app.add_middleware(HostMiddleware, allowed=settings.allowed_hosts)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origins),
            allow_methods=list(settings.allowed_methods),
            allow_headers=list(settings.allowed_headers),
            allow_credentials=settings.allow_credentials,
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    if state.tracer is not None:
        app.add_middleware(TraceContextMiddleware)
    app.add_middleware(AccessLogMiddleware)
    if settings.root_path:
        app.add_middleware(RootPathMiddleware, root_path=settings.root_path)
    register_metrics(app, llm, settings.model_name, state.handover_stats)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _hush_pydantic() -> None:
    """Of bodies and answers FastAPI keeps pydantic from warning where it makes what validates them,
    but not where that is done at the first use (`defer_build`), so the log would have it: until
    FastAPI keeps it there, too."""
    with suppress(ImportError):  # older ones do not warn
        from pydantic.warnings import UnsupportedFieldAttributeWarning

        warnings.filterwarnings("ignore", category=UnsupportedFieldAttributeWarning)


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document, but with 400 for invalid requests, as OpenAI has it, and with keys."""
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title,
            version=app.version,
            summary=app.summary,
            routes=app.routes,
            servers=app.servers or None,
        )
        schemas = schema.setdefault("components", {})
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.get("schemas", {}).pop(name, None)
        schemas["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, operations in schema["paths"].items():
            for operation in operations.values():
                operation["responses"].pop("422", None)
                if path.startswith(KEYED_PREFIXES + ADMIN_PATHS):
                    operation["security"] = [{}, {"key": []}]
        app.openapi_schema = schema
    return app.openapi_schema
