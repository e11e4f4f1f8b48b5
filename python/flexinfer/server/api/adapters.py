"""`/v1/load_lora_adapter`, `/v1/unload_lora_adapter`: adapters that come and go while serving, as
with vLLM. Behind the admin key (auth.py): they read folders of this machine."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse, Response

from flexinfer.server.http.json_route import JsonRoute
from flexinfer.server.protocol.others import LoadAdapterRequest, UnloadAdapterRequest
from flexinfer.server.state import State

router = APIRouter(prefix="/v1", tags=["adapters"], route_class=JsonRoute)
TEXT: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}}
}
"""What success looks like; errors are JSON, as everywhere."""


@router.post("/load_lora_adapter", response_class=Response, responses=TEXT)
async def load(state: State, body: LoadAdapterRequest) -> Response:
    """Serve the adapter in a folder under a name, beside the model, or in place of the adapter that
    had the name, by which requests that have chosen it are answered."""
    await state.adapters.load(body.lora_name, body.lora_path, in_place=body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} added successfully.")


@router.post("/unload_lora_adapter", response_class=Response, responses=TEXT)
async def unload(state: State, body: UnloadAdapterRequest) -> Response:
    """Serve it no more. Requests that have chosen it are answered."""
    await state.adapters.unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} removed successfully.")
