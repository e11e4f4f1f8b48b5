"""SandwichLayer: a decoder layer with norms behind attention and MLP, too: Gemma 2's and 3's."""

from __future__ import annotations

from typing import Any

import torch

from flexinfer.layers.attention import Angles, FusedAttention
from flexinfer.layers.decoder_kernel import LayerNorms
from flexinfer.layers.mlp import GatedMLP
from flexinfer.layers.norm import fused_norm
from flexinfer.layers.one_call_layer import OneCallLayer


class SandwichLayer(OneCallLayer):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))): sandwich normalisation (CogView,
    Ding et al., 2021)."""

    def __init__(self, layer: Any, attention: FusedAttention, mlp: GatedMLP) -> None:
        """layer: of Gemma 3's kind; attention, mlp: what takes the place of its own."""
        super().__init__(layer)
        self.input_layernorm = fused_norm(layer.input_layernorm)
        self.self_attn = attention
        self.post_attention_layernorm = fused_norm(layer.post_attention_layernorm)
        self.pre_feedforward_layernorm = fused_norm(layer.pre_feedforward_layernorm)
        self.mlp = mlp
        self.post_feedforward_layernorm = fused_norm(layer.post_feedforward_layernorm)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Angles | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        **others: Any,
    ) -> torch.Tensor:
        """hidden_states: [1, tokens, width]. past_key_values: as FusedDecoderLayer's."""
        cache = past_key_values if cache is None else cache
        found = self.in_one_call(hidden_states, position_embeddings, cache)
        if found is not None:
            return found[0]
        attended, _ = self.self_attn(
            self.input_layernorm(hidden_states), position_embeddings, attention_mask, cache
        )
        x = hidden_states + self.post_attention_layernorm(attended)
        computed = self.mlp(self.pre_feedforward_layernorm(x))
        output: torch.Tensor = x + self.post_feedforward_layernorm(computed)
        return output

    def kernel_parts(self) -> tuple[GatedMLP | None, LayerNorms]:
        return self.mlp, LayerNorms(
            self.input_layernorm,
            self.pre_feedforward_layernorm,
            self.post_attention_layernorm,
            self.post_feedforward_layernorm,
        )
