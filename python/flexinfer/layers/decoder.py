"""FusedDecoderLayer: a decoder layer whose additions are done by the products before them, and
which is one call of our own kernel where it can be, up to its MLP if that is no gated one."""

from __future__ import annotations

from typing import Any

import torch

from flexinfer.layers.attention import Angles, FusedAttention, fuse_attention
from flexinfer.layers.decoder_kernel import LayerNorms
from flexinfer.layers.known import (
    DECODER_LAYERS,
    DECODER_LAYERS_WITH_SCORES,
    SANDWICH_LAYERS,
)
from flexinfer.layers.mlp import GatedMLP, fuse_mlp
from flexinfer.layers.norm import fused_norm
from flexinfer.layers.one_call_layer import OneCallLayer
from flexinfer.layers.recognise import is_known
from flexinfer.layers.sandwich_layer import SandwichLayer


class FusedDecoderLayer(OneCallLayer):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        layer: Any,
        attention: FusedAttention,
        mlp: torch.nn.Module,
        tells_scores: bool = False,
    ) -> None:
        """layer: of Llama's kind; attention, mlp: what takes the place of its own. An mlp that is
        no GatedMLP, a mixture of experts, gives [1, tokens, width] of as much; tells_scores: and
        something else."""
        super().__init__(layer)
        self.tells_scores = tells_scores
        self.input_layernorm = fused_norm(layer.input_layernorm)
        self.self_attn = attention
        self.post_attention_layernorm = fused_norm(layer.post_attention_layernorm)
        self.mlp = mlp

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: Angles | None = None,
        cache: Any = None,
        rows: torch.Tensor | None = None,
        past_key_values: Any = None,
        **others: Any,
    ) -> torch.Tensor:
        """hidden_states: [1, tokens, width]. rows: int64, of the tokens, whose output alone is
        wanted: [1, rows, width]; None: all. past_key_values: the cache, as transformers calls it
        before 5.24."""
        cache = past_key_values if cache is None else cache
        if rows is None:
            found = self.in_one_call(hidden_states, position_embeddings, cache)
            if found is not None:
                x, normed = found
                return x if normed is None else self._add_mlp(x, normed)
        x, _ = self.self_attn(
            self.input_layernorm(hidden_states),
            position_embeddings,
            attention_mask,
            cache,
            hidden_states if rows is None else hidden_states.index_select(1, rows),
            rows,
        )
        return self._add_mlp(x, self.post_attention_layernorm(x))

    def _add_mlp(self, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor
        if isinstance(self.mlp, GatedMLP):
            output = self.mlp(normed, x)
        else:
            found = self.mlp(normed)
            output = x + (found[0] if self.tells_scores else found)
        return output

    def kernel_parts(self) -> tuple[GatedMLP | None, LayerNorms]:
        mlp = self.mlp if isinstance(self.mlp, GatedMLP) else None
        return mlp, LayerNorms(self.input_layernorm, self.post_attention_layernorm)


def fuse_decoder_layer(module: Any) -> FusedDecoderLayer | SandwichLayer | None:
    """What may take the module's place; None: it is of another kind, or one of its parts is."""
    is_sandwich = is_known(module, SANDWICH_LAYERS)
    if not is_sandwich and not is_known(module, DECODER_LAYERS):
        return None
    attention = fuse_attention(module.self_attn)
    mlp = None if attention is None else fuse_mlp(module.mlp)
    if attention is None or mlp is None:
        return None
    kind = SandwichLayer if is_sandwich else FusedDecoderLayer
    return kind(module, attention, mlp)


def fuse_around_mlp(module: Any) -> FusedDecoderLayer | None:
    """The same for a layer whose parts have been looked at, with the MLP that it then has."""
    attention = getattr(module, "self_attn", None)
    if type(attention) is not FusedAttention:
        return None
    tells_scores = is_known(module, DECODER_LAYERS_WITH_SCORES)
    if not tells_scores and not is_known(module, DECODER_LAYERS):
        return None
    return FusedDecoderLayer(module, attention, module.mlp, tells_scores)
