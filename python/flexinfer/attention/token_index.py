"""TokenIndex: which tokens a layer of sparse attention sees (DeepSeek-V3.2, section 2.1).

Such a layer has an indexer, which keeps one narrow key per token beside the KV and chooses, for
each query, the tokens whose keys score highest. These keys stand in the arena as a layer of their
own, so they are shared, forked, swapped and evicted as all KV is. The model's own indexer computes
and scores them, request by request, over what stands in the request's range.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

import torch

from flexinfer.attention.base import AttentionMetadata, LayerKV
from flexinfer.attention.hook import step_in_force
from flexinfer.errors import UnsupportedModelError
from flexinfer.runtime.cache_argument import today

ARGUMENTS = (
    "hidden_states",
    "q_resid",
    "position_embeddings",
    "attention_mask",
    "position_ids",
    "cache",
)
"""Of an indexer's forward, by their names of today."""


class IndexKeys:
    """What an indexer takes for a cache: one request's index keys."""

    def __init__(self, arena: torch.Tensor | None = None, start: int = 0) -> None:
        """arena: [max_seq_len, width] of the request, whose new tokens begin at `start`; None: keys
        are looked at, not kept."""
        self._arena, self._start = arena, start
        self.width = 0
        self.dtype: torch.dtype | None = None

    def update_indexer(self, keys: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """keys: [1, tokens, width], of the new tokens. Returns those of all tokens so far."""
        self.width, self.dtype = keys.shape[2], keys.dtype
        if self._arena is None:
            return keys
        end = self._start + keys.shape[1]
        self._arena[self._start : end] = keys[0]
        return self._arena[None, :end]


class TokenIndex:
    """Takes the place of an indexer's `forward`, for the engine alone: elsewhere it is as ever."""

    def __init__(self, module: Any, implementations: Collection[str]) -> None:
        """module: the attention whose indexer it is."""
        self._module, self._indexer = module, module.indexer
        self._implementations = implementations
        self.seen = IndexKeys()
        """Of the probe: the shape of its keys."""
        self.layer_idx = -1
        """Of the arena that holds its keys; `describe` says which."""

    def __call__(
        self,
        hidden_states: torch.Tensor,
        q_resid: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor | None,
        cache: Any = None,
        past_key_values: Any = None,
    ) -> torch.Tensor:
        """hidden_states, q_resid: [1, num_tokens, ...]. Returns [1, num_tokens, n] int32: positions
        in each token's request, -1: none; n is 0 where every token sees all before it."""
        call = type(self._indexer).forward
        cache = past_key_values if cache is None else cache
        others = (position_embeddings, attention_mask, position_ids, cache)
        if self._module.config._attn_implementation not in self._implementations:
            chosen: torch.Tensor = call(self._indexer, hidden_states, q_resid, *others)
            return chosen
        step = step_in_force()
        num_tokens = hidden_states.shape[1]
        if step is None:
            mask = causal_mask(0, num_tokens, hidden_states.device)
            call(self._indexer, hidden_states, q_resid, position_embeddings, mask, None, self.seen)
            return hidden_states.new_empty(1, num_tokens, 0, dtype=torch.int32)
        backend, metadata = step
        return self._select(
            hidden_states, q_resid, position_embeddings, backend.layers[self.layer_idx], metadata
        )

    def _select(
        self,
        hidden_states: torch.Tensor,
        q_resid: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        arena: LayerKV,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        cos, sin = position_embeddings
        longest = max((s.end for s in metadata.segments), default=0)
        width = min(longest, self._indexer.index_topk)
        selected = hidden_states.new_full((1, hidden_states.shape[1], width), -1, dtype=torch.int32)
        for s in metadata.segments:
            rows = slice(s.row, s.row + s.num_tokens)
            chosen: torch.Tensor = type(self._indexer).forward(
                self._indexer,
                hidden_states[:, rows],
                q_resid[:, rows],
                (cos[:, rows], sin[:, rows]),
                causal_mask(s.start, s.end, hidden_states.device),
                None,
                IndexKeys(arena.k[s.slot, :, 0], s.start),
            )
            selected[:, rows, : chosen.shape[2]] = chosen
        return selected[..., :0] if longest <= self._indexer.index_topk else selected


def causal_mask(start: int, end: int, device: torch.device) -> torch.Tensor:
    """[1, end - start, end]: whether the tokens from `start` on see each of the first `end`."""
    rows = torch.arange(start, end, device=device)[:, None]
    return (torch.arange(end, device=device)[None] <= rows)[None]


def index_tokens(model: torch.nn.Module, implementations: Collection[str]) -> None:
    """Have indexers keep their keys in the arena, under these attention functions. Raises
    UnsupportedModelError for an indexer of another kind."""
    for module in model.modules():
        indexer: Any = getattr(module, "indexer", None)
        if indexer is None:
            continue
        parameters = list(inspect.signature(type(indexer).forward).parameters)
        arguments = tuple(today(name) for name in parameters[1:])
        if arguments != ARGUMENTS or not hasattr(indexer, "index_topk"):
            raise UnsupportedModelError(
                f"{type(indexer).__name__} indexes something else than tokens: not supported"
            )
        indexer.__dict__["forward"] = TokenIndex(module, implementations)


def token_indexes(model: torch.nn.Module) -> list[TokenIndex]:
    """Those of the model, in the order of its layers."""
    found = [module.__dict__.get("forward") for module in model.modules()]
    return [index for index in found if isinstance(index, TokenIndex)]
