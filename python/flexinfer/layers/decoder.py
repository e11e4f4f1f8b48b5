"""LeanDecoderLayer: a decoder layer whose two additions are done by the products before them."""

from __future__ import annotations

from typing import Any

import torch

from flexinfer.attention.hook import use_probe
from flexinfer.layers.attention import LeanAttention, mix_heads, random_positions
from flexinfer.layers.mlp import GatedMLP, PackedGatedMLP
from flexinfer.layers.rotary import NUM_TRIAL_TOKENS

NORMS = ("input_layernorm", "post_attention_layernorm")


class LeanDecoderLayer(torch.nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, layer: Any) -> None:
        """layer: of Llama's kind, its attention and its MLP lean already."""
        super().__init__()
        self.input_layernorm: torch.nn.Module = layer.input_layernorm
        self.self_attn: torch.nn.Module = layer.self_attn
        self.post_attention_layernorm: torch.nn.Module = layer.post_attention_layernorm
        self.mlp: torch.nn.Module = layer.mlp
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


def lean_decoder_layer(module: torch.nn.Module) -> LeanDecoderLayer | None:
    """What takes the module's place: None where it is not of this kind or computes otherwise."""
    children = dict(module.named_children())
    attention, mlp = children.pop("self_attn", None), children.pop("mlp", None)
    if not isinstance(attention, LeanAttention) or not isinstance(mlp, (GatedMLP, PackedGatedMLP)):
        return None
    if set(children) != set(NORMS) or any(True for _ in module.parameters(recurse=False)):
        return None
    lean = LeanDecoderLayer(module)
    return lean if _same_layer(module, lean, attention) else None


@torch.inference_mode()
def _same_layer(layer: Any, lean: LeanDecoderLayer, attention: LeanAttention) -> bool:
    """Whether both give the same for random input, up to rounding."""
    dtype = attention.o_proj.weight.dtype
    width = attention.o_proj.out_features
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, NUM_TRIAL_TOKENS, width, generator=generator).to(dtype)
    positions = random_positions(attention.head_dim, dtype)
    try:
        with use_probe(attention, lambda *call: mix_heads(*call[1:4]), set()):
            expected, output = layer(x, position_embeddings=positions), lean(x, None, positions)
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return False
    if not isinstance(expected, torch.Tensor) or expected.shape != output.shape:
        return False
    tolerance = 20 * torch.finfo(dtype).eps * expected.abs().max().item()
    return bool((expected - output).abs().max() <= tolerance)
