"""KV events as messages: vLLM's fields, in its encoding since 2026. A batch is an array of its time
in seconds since the epoch, its events and a rank; an event is a map with its `type`.

`medium` is "GPU" on every device, as in vLLM: the memory that the model computes in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

from flexinfer.vtensor.block_events import BLOCK_TOKENS, BlockEvent, BlockEventKind

MEDIUM = "GPU"


class BlockStored(TypedDict):
    """Blocks of `block_size` tokens, each the continuation of the one before."""

    type: Literal["BlockStored"]
    block_hashes: list[int]
    parent_block_hash: int | None
    """None: the first block begins a prompt."""
    token_ids: list[int]
    block_size: int
    lora_id: None
    medium: str
    lora_name: None
    extra_keys: list[list[str] | None]
    """One entry per block: the cache salt with the block that begins a prompt, None otherwise."""


class BlockRemoved(TypedDict):
    type: Literal["BlockRemoved"]
    block_hashes: list[int]
    medium: str


class AllBlocksCleared(TypedDict):
    type: Literal["AllBlocksCleared"]


Event = BlockStored | BlockRemoved | AllBlocksCleared
Batch = tuple[float, list[Event], int]


def message_of(event: BlockEvent) -> Event:
    if event.kind == BlockEventKind.REMOVED:
        return {"type": "BlockRemoved", "block_hashes": event.blocks, "medium": MEDIUM}
    if event.kind == BlockEventKind.CLEARED:
        return {"type": "AllBlocksCleared"}
    blocks = event.blocks
    extra: list[list[str] | None] = [None] * len(blocks)
    if event.parent is None and event.cache_salt:
        extra[0] = [event.cache_salt]
    return {
        "type": "BlockStored",
        "block_hashes": blocks,
        "parent_block_hash": event.parent,
        "token_ids": event.tokens,
        "block_size": BLOCK_TOKENS,
        "lora_id": None,
        "medium": MEDIUM,
        "lora_name": None,
        "extra_keys": extra,
    }


def tells_everything(events: Sequence[BlockEvent]) -> bool:
    """Whether who knows nothing knows all after these."""
    return bool(events) and events[0].kind == BlockEventKind.CLEARED
