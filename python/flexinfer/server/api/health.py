"""`/health`, `/ready`, `/version`: for load balancers, which may ask with HEAD, and people."""

from __future__ import annotations

from importlib import metadata

from fastapi import APIRouter

from flexinfer.server.http.errors import APIError
from flexinfer.server.protocol.others import Status, Version
from flexinfer.server.state import State

router = APIRouter(tags=["health"])


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(state: State) -> Status:
    """200 while the engine lives, asleep or not."""
    if not state.llm.is_running:
        raise APIError(503, "the engine has stopped", code="engine_dead")
    return Status(status="ok")


# The last one is asked first: a route that answers all methods names them all where it refuses one.
@router.get("/ping")
@router.post("/ping")
@router.api_route("/ping", methods=["GET", "HEAD", "POST"], include_in_schema=False)
async def ping(state: State) -> Status:
    """`/health` under the name that SageMaker asks for."""
    return await health(state)


@router.head("/ready", include_in_schema=False)
@router.get("/ready")
async def ready(state: State) -> Status:
    """200 while new requests are taken."""
    if not state.llm.is_running:
        raise APIError(503, "the engine has stopped", code="engine_dead")
    if state.is_draining:
        raise APIError(503, "the server is shutting down", code="shutting_down")
    if await state.llm.is_sleeping():
        raise APIError(503, "the engine is asleep: POST /admin/wake", code="asleep")
    return Status(status="ready")


@router.get("/version")
async def version() -> Version:
    return Version(version=metadata.version("flexinfer"))
