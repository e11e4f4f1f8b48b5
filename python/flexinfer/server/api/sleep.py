"""Sleep: all KV memory of a serving engine goes back to the system, and comes again.

`/admin/sleep`, `/admin/wake`, and the same by vLLM's names, as trainers call them between two
rollouts: `/sleep`, `/wake_up`, `/is_sleeping`. Behind the admin key (auth.py).
"""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query

from flexinfer.server.http.errors import bad_request
from flexinfer.server.http.json_route import JsonRoute
from flexinfer.server.protocol.others import SleepAnswer, SleepRequest, SleepState
from flexinfer.server.state import AskedHere, State

router = APIRouter(tags=["admin"], route_class=JsonRoute, dependencies=[AskedHere])
Level = Annotated[int, Query(ge=1, le=2)]
Tags = Annotated[list[str] | None, Query()]


@router.post("/admin/sleep")
async def sleep(state: State, body: SleepRequest | None = None) -> SleepAnswer:
    """Give all KV memory back; requests wait for /admin/wake."""
    return await sleep_as_vllm(state, (body or SleepRequest()).level, "keep")


@router.post("/admin/wake")
async def wake(state: State) -> SleepState:
    """Undo /admin/sleep. 503, still asleep, when memory is short."""
    return await wake_up(state)


@router.post("/sleep")
async def sleep_as_vllm(
    state: State, level: Level = 1, mode: Literal["abort", "keep"] = "abort"
) -> SleepAnswer:
    """The same; requests under way are answered 503 `aborted`, or wait too (`mode=keep`)."""
    try:
        return SleepAnswer(returned_bytes=await state.llm.sleep(level, mode))
    finally:
        state.memory_map.outdate()


@router.post("/wake_up")
async def wake_up(state: State, tags: Tags = None) -> SleepState:
    """The same; tags: parts of vLLM's, of which "kv_cache" alone is ever away."""
    try:
        is_awake = await state.change_memory(lambda engine: engine.wake_up(tags))
    except ValueError as error:
        raise bad_request(str(error), "tags") from None
    return SleepState(is_sleeping=not is_awake)


@router.get("/is_sleeping")
async def is_sleeping(state: State) -> SleepState:
    """Whether its KV memory is away."""
    return SleepState(is_sleeping=await state.llm.is_sleeping())
