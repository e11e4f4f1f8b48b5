"""A subscriber to KV events: the tree of blocks that it knows of, from events alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flexinfer.events.messages import BlockStored, Event
from flexinfer.vtensor import VTensorManager

Path = tuple[str, tuple[int, ...]]
"""Salt, and the tokens from the beginning of the prompt to the end of a block."""


@dataclass
class KnownBlocks:
    paths: dict[int, Path] = field(default_factory=dict)
    """By the hash of the last block."""

    def apply(self, event: Event) -> None:
        if event["type"] == "AllBlocksCleared":
            self.paths.clear()
        elif event["type"] == "BlockRemoved":
            for block in event["block_hashes"]:
                del self.paths[block]
        else:
            self._store(event)

    def _store(self, event: BlockStored) -> None:
        assert event["block_size"] == 16
        assert len(event["token_ids"]) == 16 * len(event["block_hashes"])
        assert len(event["extra_keys"]) == len(event["block_hashes"])
        if event["parent_block_hash"] is None:
            extra = event["extra_keys"][0]
            salt, tokens = extra[0] if extra else "", ()
        else:
            salt, tokens = self.paths[event["parent_block_hash"]]
        for i, block in enumerate(event["block_hashes"]):
            tokens = (*tokens, *event["token_ids"][16 * i : 16 * (i + 1)])
            assert block not in self.paths
            self.paths[block] = (salt, tokens)

    def check(self, manager: VTensorManager) -> None:
        """That it knows exactly what is recorded."""
        shown = manager.snapshot().prefixes
        recorded: dict[int, Any] = {}
        for prefix in shown:
            ends = range(prefix.start_tokens // 16, (prefix.start_tokens + prefix.num_tokens) // 16)
            assert len(prefix.blocks) == len(ends)
            for position, block in zip(ends, prefix.blocks, strict=True):
                salt, tokens = self.paths[block]
                recorded[block] = (salt, tokens)
                assert salt == prefix.cache_salt
                assert len(tokens) == 16 * (position + 1)
                own = tokens[prefix.start_tokens :][: len(prefix.first_tokens)]
                assert list(own) == prefix.first_tokens[: len(own)]
        assert recorded == self.paths
        assert len(set(self.paths.values())) == len(self.paths)
