"""FusedAttention: a transformers attention module in fewer calls.

Queries, keys and values come out of one matrix product, and queries and keys are rotated where they
then stand, in one pass. The residual is added by the last product.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from flexinfer.attention.base import AttentionOptions
from flexinfer.attention.hook import attending_for, use_probe
from flexinfer.layers import operators
from flexinfer.layers import rows as row_ops
from flexinfer.layers.adapters import Part
from flexinfer.layers.formats import is_linear, make_linear
from flexinfer.layers.known import ATTENTIONS, ATTENTIONS_BY_HALVES, ATTENTIONS_WITH_NORMS
from flexinfer.layers.linear import Linear
from flexinfer.layers.norm import fused_norm
from flexinfer.layers.recognise import is_known
from flexinfer.layers.trial import NOT_OF_THIS_KIND, NUM_TRIAL_TOKENS

Angles = tuple[torch.Tensor, torch.Tensor]
"""cos and sin [1, tokens, head_dim], whose halves are the same, or one half of each."""
Rotary = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""(q, k [1, heads, tokens, dim], cos, sin [1, tokens, dim]) -> q, k rotated."""


class FusedAttention(torch.nn.Module):
    """In the place of an attention module of Llama's kind."""

    def __init__(self, attention: Any, options: AttentionOptions, has_norms: bool) -> None:
        """options: what the module passes to the attention function; has_norms: whether it
        normalises queries and keys."""
        super().__init__()
        operators.register()
        self.config = attention.config
        self.layer_idx = attention.layer_idx
        self.is_causal = True
        self.takes_halves = is_by_halves(attention)
        self.head_dim = attention.head_dim
        self.num_heads = attention.q_proj.out_features // self.head_dim
        self.num_kv_heads = attention.k_proj.out_features // self.head_dim
        self.num_key_value_groups = self.num_heads // self.num_kv_heads
        self.qkv_proj: Linear = make_linear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.o_proj: Linear = make_linear(attention.o_proj)
        self.q_norm: Any = fused_norm(attention.q_norm) if has_norms else None
        self.k_norm: Any = fused_norm(attention.k_norm) if has_norms else None
        names = inspect.unwrap(type(attention).forward).__globals__
        self._rotary: Rotary = names["apply_rotary_pos_emb"]
        self._eager = names.get("eager_attention_forward")
        weight = attention.o_proj.weight
        self.rotates = row_ops.supports(weight.dtype, weight.device, self.head_dim // 2)
        self.options: dict[str, Any] = {
            "scaling": options.scaling,
            "sliding_window": options.sliding_window,
            "softcap": options.softcap,
        }
        if options.sinks is not None:
            self.sinks = attention.sinks  # of which transformers' own function reads it
            self.options["s_aux"] = options.sinks.detach().float().contiguous()

    @property
    def joined(self) -> dict[str, Part]:
        """Where the outputs of the layers stand that were joined, by their names."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        parts = (("q_proj", 0, q), ("k_proj", q, kv), ("v_proj", q + kv, kv))
        return {name: Part("qkv_proj", first, width) for name, first, width in parts}

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Angles,
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        residual: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
        past_key_values: Any = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states, residual: [1, tokens, width]. Returns residual + attention. rows: of the
        tokens, of which alone this is wanted, and the residual is; None: all. past_key_values: the
        cache, as transformers calls it before 5.24."""
        cache = past_key_values if cache is None else cache
        batch, num_tokens, _ = hidden_states.shape
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        qkv = self.qkv_proj(hidden_states)
        qkv = qkv.view(batch, num_tokens, sum(heads), self.head_dim).transpose(1, 2)
        query, key, value = self._rotated(qkv, heads, position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = attention_function(self.config._attn_implementation, self._eager)
        attend = partial(attend, self, query, key, value, attention_mask, dropout=0.0)
        if rows is None:
            output, _ = attend(**self.options)
            return self.o_proj(output.reshape(batch, num_tokens, -1), residual), None
        with attending_for(rows):
            output, _ = attend(**self.options)
        output = output.reshape(batch, num_tokens, -1).index_select(1, rows)
        return self.o_proj(output, residual), None

    def whole_angles(self, angles: Angles) -> Angles:
        """Those of all of a head, as our own kernels take them."""
        if not self.takes_halves:
            return angles
        cos, sin = (torch.cat((half, half), dim=-1) for half in angles)
        return cos, sin

    def _rotated(
        self, qkv: torch.Tensor, heads: tuple[int, int, int], angles: Angles
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries and keys, normalised where the model does, and rotated; and values.
        qkv: [batch, heads, tokens, head_dim]."""
        query, key, value = qkv.split(heads, dim=1)  # type: ignore[no-untyped-call]
        if self.q_norm is not None:
            query = self.q_norm(query.transpose(1, 2)).transpose(1, 2)
            key = self.k_norm(key.transpose(1, 2)).transpose(1, 2)
        if not (self.rotates and qkv.shape[0] == 1 and angles[0].dtype == qkv.dtype):
            return *self._rotary(query, key, *angles), value
        cos, sin = self.whole_angles(angles)
        if torch.compiler.is_compiling():
            if self.q_norm is not None:
                query = operators.rotate(query, cos, sin)
                return query, operators.rotate(key, cos, sin), value
            both = operators.rotate(qkv[:, : -self.num_kv_heads], cos, sin)
            return both[:, : self.num_heads], both[:, self.num_heads :], value
        if self.q_norm is not None:
            row_ops.rotate_(query, cos, sin)
            row_ops.rotate_(key, cos, sin)
        else:
            row_ops.rotate_(qkv[:, : -self.num_kv_heads], cos, sin)
        return query, key, value


def attention_function(implementation: str, eager: Any) -> Callable[..., tuple[torch.Tensor, Any]]:
    """The function that transformers calls under this name: ours, the probe's, or its own."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function: Any = ALL_ATTENTION_FUNCTIONS.get(implementation, eager)
    return function  # type: ignore[no-any-return]


def fuse_attention(module: Any) -> FusedAttention | None:
    """What may take the module's place; None: it is of another kind."""
    has_norms = is_known(module, ATTENTIONS_WITH_NORMS)
    if not (has_norms or is_known(module, ATTENTIONS) or is_by_halves(module)):
        return None
    if not getattr(module, "is_causal", True):
        return None
    linears = [module.q_proj, module.k_proj, module.v_proj, module.o_proj]
    if not all(is_linear(linear) for linear in linears) or module.head_dim % 2:
        return None
    if linears[0].weight.device.type != "cpu":
        return None
    options = options_of(module)
    return None if options is None else FusedAttention(module, options, has_norms)


def is_by_halves(attention: Any) -> bool:
    """Whether the module takes half of the angles that others do."""
    if isinstance(attention, FusedAttention):
        return attention.takes_halves
    return is_known(attention, ATTENTIONS_BY_HALVES)


@torch.inference_mode()
def options_of(module: Any) -> AttentionOptions | None:
    """What the module asks attention for; None: something that a fused one would not."""
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
            raise ValueError("the attention is told something that a fused module would not")
        found.append(options)
        return mix_heads(query, key, value)

    weight = module.q_proj.weight
    x = weight.new_zeros(1, NUM_TRIAL_TOKENS, weight.shape[1])
    positions = random_positions(module, weight.dtype)
    try:
        with use_probe(module, look, set()):
            module(hidden_states=x, position_embeddings=positions, attention_mask=None)
    except NOT_OF_THIS_KIND:
        return None
    if len(found) != 1:
        return None
    sinks, num_heads = found[0].sinks, module.q_proj.out_features // module.head_dim
    if sinks is not None and not (sinks is module.sinks and sinks.shape == (num_heads,)):
        return None
    return found[0]


def run_attention(module: Any, x: torch.Tensor) -> torch.Tensor:
    """A trial of an attention module: its output where heads are mixed in place of attention."""
    positions = random_positions(module, x.dtype)
    with use_probe(module, lambda *call: mix_heads(*call[1:4]), set()):
        output, _ = module(hidden_states=x, position_embeddings=positions, attention_mask=None)
    return output  # type: ignore[no-any-return]


def run_decoder_layer(module: Any, x: torch.Tensor) -> torch.Tensor:
    """As `run_attention`, for the decoder layer around it."""
    positions = random_positions(module.self_attn, x.dtype)
    with use_probe(module.self_attn, lambda *call: mix_heads(*call[1:4]), set()):
        return module(x, position_embeddings=positions)  # type: ignore[no-any-return]


def random_positions(attention: Any, dtype: torch.dtype) -> Angles:
    """Of NUM_TRIAL_TOKENS, for trials: as many as the module takes."""
    generator = torch.Generator().manual_seed(1)
    angles = torch.randn(1, NUM_TRIAL_TOKENS, attention.head_dim // 2, generator=generator)
    if not is_by_halves(attention):
        angles = angles.repeat(1, 1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def mix_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """In the place of attention in a trial: something that tells queries, keys and values apart.

    [heads, tokens, dim] of each to [tokens, heads, dim].
    """
    group = query.shape[0] // key.shape[0]
    mixed = query + (2 * key + 3 * value).repeat_interleave(group, dim=0)
    return mixed.transpose(0, 1)
