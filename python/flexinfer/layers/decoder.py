"""FusedDecoderLayer: a decoder layer whose two additions are done by the products before them."""

from __future__ import annotations

from typing import Any

import torch

from flexinfer.layers.attention import FusedAttention, fuse_attention
from flexinfer.layers.known import DECODER_LAYERS
from flexinfer.layers.mlp import GatedMLP, fuse_mlp
from flexinfer.layers.norm import fuse_norm
from flexinfer.layers.recognise import is_known


class FusedDecoderLayer(torch.nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, layer: Any, attention: FusedAttention, mlp: GatedMLP) -> None:
        """layer: of Llama's kind; attention, mlp: what takes the place of its own."""
        super().__init__()
        self.input_layernorm = _norm(layer.input_layernorm)
        self.self_attn = attention
        self.post_attention_layernorm = _norm(layer.post_attention_layernorm)
        self.mlp = mlp
        if hasattr(layer, "attention_type"):
            self.attention_type = layer.attention_type  # the model reads it

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        past_key_values: Any = None,
        **others: Any,
    ) -> torch.Tensor:
        """hidden_states: [1, tokens, width]"""
        x, _ = self.self_attn(
            self.input_layernorm(hidden_states),
            position_embeddings,
            attention_mask,
            past_key_values,
            hidden_states,
        )
        return self.mlp(self.post_attention_layernorm(x), x)  # type: ignore[no-any-return]


def fuse_decoder_layer(module: Any) -> FusedDecoderLayer | None:
    """What may take the module's place; None: it is of another kind, or one of its parts is."""
    if not is_known(module, DECODER_LAYERS):
        return None
    attention = fuse_attention(module.self_attn)
    mlp = None if attention is None else fuse_mlp(module.mlp)
    if attention is None or mlp is None:
        return None
    return FusedDecoderLayer(module, attention, mlp)


def _norm(module: torch.nn.Module) -> torch.nn.Module:
    return fuse_norm(module) or module
