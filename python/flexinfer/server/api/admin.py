"""`/admin/...`: memory and traces of a serving engine, behind the admin key (auth.py)."""

from __future__ import annotations

import dataclasses
import os
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import Response

from flexinfer.engine.llm_engine import LLMEngine
from flexinfer.errors import DriverError, OutOfMemoryError
from flexinfer.memory.elastic import BudgetChange
from flexinfer.server.http.errors import APIError, bad_request
from flexinfer.server.http.json_route import JsonRoute
from flexinfer.server.observability.memory_map import DEFAULT_MAX_ROWS
from flexinfer.server.protocol.others import (
    BudgetAnswer,
    BudgetRequest,
    ResetAnswer,
    TraceAnswer,
    TraceRequest,
)
from flexinfer.server.state import AskedHere, ServerState, State
from flexinfer.vtensor import parse_bytes

router = APIRouter(prefix="/admin", tags=["admin"], route_class=JsonRoute, dependencies=[AskedHere])
MaxRows = Annotated[int, Query(ge=1, le=1 << 20)]
IfNoneMatch = Annotated[str | None, Header()]


@router.get("/memory", response_class=Response, responses={304: {"description": "unchanged"}})
async def memory(
    request: Request,
    state: State,
    max_rows: MaxRows = DEFAULT_MAX_ROWS,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """The memory map: every vTensor's chunks, every chunk's sharers, every recorded prefix."""
    rendered = await state.memory_map.render(max_rows)
    if state.replica is not None:
        rendered = rendered.among(state.replica, request.scope["state"]["replicas"])
    headers = {"ETag": rendered.etag, "Cache-Control": "no-cache"}
    if if_none_match == rendered.etag:
        return Response(status_code=304, headers=headers)
    return Response(rendered.body, media_type="application/json", headers=headers)


@router.post("/budget")
async def budget(state: State, body: BudgetRequest) -> BudgetAnswer:
    """Change the budget of physical KV memory; when it answers, the memory is given back."""

    def change_budget(engine: LLMEngine) -> BudgetChange:
        if engine.is_sleeping():
            raise APIError(409, "the engine is asleep: POST /admin/wake first", code="asleep")
        return engine.set_kv_cache_memory(_budget_bytes(engine, body.kv_cache_memory))

    try:
        change = await state.change_memory(change_budget)
    except OutOfMemoryError as error:
        raise APIError(409, str(error), param="kv_cache_memory", code="memory_in_use") from None
    except ValueError as error:
        raise bad_request(str(error), "kv_cache_memory") from None
    return BudgetAnswer(**dataclasses.asdict(change))


def _budget_bytes(engine: LLMEngine, wanted: int | str) -> int:
    """Raises ValueError for more than this machine has: its use would fail, not its promise."""
    num_bytes = parse_bytes(wanted, "kv_cache_memory")
    if engine.loaded.device.type != "cpu":
        return num_bytes
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_bytes > installed:
        raise ValueError(f"kv_cache_memory is {num_bytes} bytes; this machine has {installed}")
    return num_bytes


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(state: State) -> ResetAnswer:
    """Forget all recorded prefixes that are not pinned."""
    try:
        return ResetAnswer(
            forgotten_tokens=await state.change_memory(lambda engine: engine.reset_prefix_cache())
        )
    except ValueError as error:  # asleep
        raise APIError(409, str(error), code="asleep") from None


@router.post("/trace")
async def trace(state: State, body: TraceRequest) -> TraceAnswer:
    """Write every memory operation into a file in --trace-dir, for `flexinfer replay`."""
    try:
        if body.action == "start":
            return await _start_trace(state, body.name)
        await state.llm.call(lambda engine: engine.manager.stop_trace())
    except DriverError as error:
        raise APIError(409, str(error), code="trace_failed") from None
    except ValueError as error:
        raise APIError(409, str(error), code="trace_state") from None
    path, state.trace_path = state.trace_path, None
    return TraceAnswer(tracing=False, path=None if path is None else str(path))


async def _start_trace(state: ServerState, name: str) -> TraceAnswer:
    directory = state.settings.trace_dir
    if directory is None:
        raise APIError(403, "start the server with --trace-dir for traces", code="no_trace_dir")
    # Several replicas may write into one directory.
    path = directory / (name if state.replica is None else f"{state.replica}-{name}")

    def start(engine: LLMEngine) -> None:
        if engine.manager.tracing:
            raise ValueError("a trace is being written already: stop it first")
        engine.manager.start_trace(path)

    await state.llm.call(start)
    state.trace_path = path
    return TraceAnswer(tracing=True, path=str(path))
