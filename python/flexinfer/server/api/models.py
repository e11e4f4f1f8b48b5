"""`GET /v1/models`: the names under which the model is served."""

from __future__ import annotations

from fastapi import APIRouter

from flexinfer.server.protocol.others import ModelCard, ModelList
from flexinfer.server.state import ServerState, State

router = APIRouter(prefix="/v1/models", tags=["models"])


@router.get("/", include_in_schema=False)  # else it would be the model without a name
@router.get("")
async def list_models(state: State) -> ModelList:
    """All names under which the one model is served, and its adapters."""
    names = (*state.settings.served_model_names, *state.adapters)
    return ModelList(data=[_card(state, name) for name in names])


@router.get("/{name:path}")
async def get_model(state: State, name: str) -> ModelCard:
    state.check_model(name)
    return _card(state, name)


def _card(state: ServerState, name: str) -> ModelCard:
    adapter, own = state.adapters.get(name), state.settings.model_name
    return ModelCard(
        id=name,
        created=state.created,
        root=own if adapter is None else adapter.request.lora_path,
        parent=None if adapter is None else adapter.request.base_model_name or own,
        max_model_len=state.llm.max_model_len,
    )
