"""`/v1/load_lora_adapter`, `/v1/unload_lora_adapter`: adapters that come and go while serving, as
with vLLM. Behind the admin key (auth.py): they read folders of this machine."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from flexinfer.server.http.json_route import JsonRoute
from flexinfer.server.protocol.others import LoadAdapterRequest, UnloadAdapterRequest
from flexinfer.server.state import State

router = APIRouter(prefix="/v1", tags=["adapters"], route_class=JsonRoute)


@router.post("/load_lora_adapter", response_class=PlainTextResponse)
async def load(state: State, body: LoadAdapterRequest) -> str:
    """Serve the adapter in a folder under a name, beside the model."""
    await state.adapters.load(body.lora_name, body.lora_path)
    return f"Success: LoRA adapter {body.lora_name!r} added successfully."


@router.post("/unload_lora_adapter", response_class=PlainTextResponse)
async def unload(state: State, body: UnloadAdapterRequest) -> str:
    """Serve it no more. Requests that have chosen it are answered."""
    await state.adapters.unload(body.lora_name)
    return f"Success: LoRA adapter {body.lora_name!r} removed successfully."
