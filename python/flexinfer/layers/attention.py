"""LeanAttention: a transformers attention module in fewer calls.

Queries, keys and values come out of one matrix product, and queries and keys are rotated where they
then stand, in one pass. The residual is added by the last product.

Recognised by its children and by what it does: on random input the same queries, keys and values
must reach the attention function, with the same settings, and the same output must come back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flexinfer.attention.base import AttentionOptions
from flexinfer.attention.hook import use_probe
from flexinfer.layers import operators as lean_operators
from flexinfer.layers import rows as row_ops
from flexinfer.layers.pack import add_linear, join_linears
from flexinfer.layers.rotary import NUM_TRIAL_TOKENS, Rotary, plain_rotary

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
NORMS = ("q_norm", "k_norm")


class LeanAttention(torch.nn.Module):
    """In the place of an attention module of Llama's kind; REQUIRES the lean layers' conditions."""

    def __init__(self, attention: Any, rotary: Rotary, options: AttentionOptions) -> None:
        """rotary: transformers' function, for compiled models; options: what the module passes."""
        super().__init__()
        lean_operators.register()
        self.config = attention.config
        self.layer_idx = attention.layer_idx
        self.is_causal = True
        self.head_dim = attention.head_dim
        self.num_heads = attention.q_proj.out_features // self.head_dim
        self.num_kv_heads = attention.k_proj.out_features // self.head_dim
        self.num_key_value_groups = self.num_heads // self.num_kv_heads
        self.qkv_proj: Any = join_linears(attention.q_proj, attention.k_proj, attention.v_proj)
        self.o_proj = attention.o_proj
        self.q_norm: Any = getattr(attention, "q_norm", None)
        self.k_norm: Any = getattr(attention, "k_norm", None)
        self._rotary = rotary
        self._eager = type(attention).forward.__globals__.get("eager_attention_forward")
        weight = attention.o_proj.weight
        self._rotates = row_ops.supports(weight.dtype, weight.device, self.head_dim // 2)
        self._options = {
            "scaling": options.scaling,
            "sliding_window": options.sliding_window,
            "softcap": options.softcap,
        }

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        residual: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states, residual: [1, tokens, width]; position_embeddings: cos and sin
        [1, tokens, head_dim]. Returns residual + attention."""
        batch, num_tokens, _ = hidden_states.shape
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        qkv = self.qkv_proj(hidden_states)
        qkv = qkv.view(batch, num_tokens, sum(heads), self.head_dim).transpose(1, 2)
        query, key, value = qkv.split(heads, dim=1)
        if self.q_norm is not None:
            query = self.q_norm(query.transpose(1, 2)).transpose(1, 2)
            key = self.k_norm(key.transpose(1, 2)).transpose(1, 2)
        cos, sin = position_embeddings
        can_rotate = self._rotates and batch == 1 and cos.dtype == qkv.dtype
        if not can_rotate:
            query, key = self._rotary(query, key, cos, sin)
        elif torch.compiler.is_compiling():
            if self.q_norm is not None:
                query = lean_operators.rotate(query, cos, sin)
                key = lean_operators.rotate(key, cos, sin)
            else:
                rotated = lean_operators.rotate(qkv[:, : -self.num_kv_heads], cos, sin)
                query, key = rotated[:, : self.num_heads], rotated[:, self.num_heads :]
        elif self.q_norm is not None:
            row_ops.rotate_(query, cos, sin)
            row_ops.rotate_(key, cos, sin)
        else:
            row_ops.rotate_(qkv[:, : -self.num_kv_heads], cos, sin)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = attention_function(self.config._attn_implementation, self._eager)
        output, _ = attend(self, query, key, value, attention_mask, dropout=0.0, **self._options)
        output = output.reshape(batch, num_tokens, -1)
        return add_linear(self.o_proj, output, residual), None


def attention_function(implementation: str, eager: Any) -> Callable[..., tuple[torch.Tensor, Any]]:
    """The function that transformers calls under this name: ours, the probe's, or its own."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function: Any = ALL_ATTENTION_FUNCTIONS.get(implementation, eager)
    return function  # type: ignore[no-any-return]


def lean_attention(module: torch.nn.Module) -> LeanAttention | None:
    """What can take the module's place, if it computes the same."""
    children = dict(module.named_children())
    linears: list[Any] = [children.pop(name, None) for name in PROJECTIONS]
    norms = [name for name in NORMS if children.pop(name, None) is not None]
    if len(norms) == 1 or any(_is_watched(child) for child in module.modules()):
        return None
    if not getattr(module, "is_causal", True):
        return None
    # What else the module may have has no weights (a rotary embedding of older models).
    if any(True for child in children.values() for _ in child.parameters()):
        return None
    if not all(type(linear) is torch.nn.Linear for linear in linears):
        return None
    rotary, head_dim = plain_rotary(module), getattr(module, "head_dim", None)
    weight = linears[0].weight
    if rotary is None or not isinstance(head_dim, int) or head_dim % 2:
        return None
    if weight.device.type != "cpu":
        return None
    if any(linear.out_features % head_dim for linear in linears[:3]):
        return None
    return _same_attention(module, rotary)


@torch.inference_mode()
def _same_attention(module: Any, rotary: Rotary) -> LeanAttention | None:
    """The lean module, if both call attention alike and give the same, up to rounding."""
    weight = module.q_proj.weight
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, NUM_TRIAL_TOKENS, weight.shape[1], generator=generator).to(weight.dtype)
    found: list[AttentionOptions] = []

    def look(
        caller: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
        others: dict[str, Any],
    ) -> torch.Tensor:
        if any(value is not None and name != "dropout" for name, value in others.items()):
            raise ValueError("the attention is told something that a lean module would not")
        found.append(options)
        return mix_heads(query, key, value)

    positions = random_positions(module.head_dim, weight.dtype)
    arguments: dict[str, Any] = {"position_embeddings": positions, "attention_mask": None}
    try:
        with use_probe(module, look, set()):
            expected, _ = module(hidden_states=x, **arguments)
            if len(found) != 1 or found[0].sinks is not None:
                return None
            lean = LeanAttention(module, rotary, found[0])
            output, _ = lean(x, **arguments)
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return None  # a module of another kind
    tolerance = 20 * torch.finfo(weight.dtype).eps * expected.abs().max().item()
    is_same = expected.shape == output.shape and bool((expected - output).abs().max() <= tolerance)
    return lean if is_same and found[0] == found[1] else None


def random_positions(head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of random angles, for trials: [1, NUM_TRIAL_TOKENS, head_dim]."""
    generator = torch.Generator().manual_seed(1)
    angles = torch.randn(1, NUM_TRIAL_TOKENS, head_dim // 2, generator=generator).repeat(1, 1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def mix_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """In the place of attention in a trial: something that tells queries, keys and values apart.

    [heads, tokens, dim] of each to [tokens, heads, dim].
    """
    group = query.shape[0] // key.shape[0]
    mixed = query + (2 * key + 3 * value).repeat_interleave(group, dim=0)
    return mixed.transpose(0, 1)


def _is_watched(module: torch.nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
