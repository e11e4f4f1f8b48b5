"""FusedDecoderLayer: a decoder layer whose additions are done by the products before them, and
which is one call of our own kernel where it can be, up to its MLP if that is no gated one.
SandwichLayer: the same of a layer with norms behind its parts, too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from flexinfer.attention.hook import step_in_force
from flexinfer.layers.attention import Angles, FusedAttention, fuse_attention
from flexinfer.layers.decoder_kernel import DecoderKernel, LayerNorms, make_decoder_kernel
from flexinfer.layers.known import (
    DECODER_LAYERS,
    DECODER_LAYERS_WITH_SCORES,
    SANDWICH_LAYERS,
)
from flexinfer.layers.mlp import GatedMLP, fuse_mlp
from flexinfer.layers.norm import fuse_norm
from flexinfer.layers.recognise import hooks_of, is_known


class OneCallLayer(torch.nn.Module, ABC):
    """A decoder layer that is one call of our own kernel where it can be."""

    runs_parts = False
    """Whether the parts are called one by one where one call would do: for who watches them."""
    self_attn: FusedAttention

    def __init__(self) -> None:
        super().__init__()
        self._kernel: DecoderKernel | None = None
        self._hooks: list[Mapping[int, Any]] = []
        """Those of the parts that the kernel stands for."""
        self._is_laid_out = False

    @abstractmethod
    def kernel_parts(self) -> tuple[GatedMLP | None, LayerNorms]:
        """What the kernel computes beside attention; an MLP that is None stays the caller's."""

    def kernel(self) -> DecoderKernel | None:
        """What may compute it in this step; None: the parts are to be called one by one."""
        if torch.compiler.is_compiling():  # first: the others cannot be traced
            return None
        if self.runs_parts or step_in_force() is None:
            return None
        if not self._is_laid_out:  # by the first step; in a trial it is not yet
            mlp, norms = self.kernel_parts()
            self._kernel = make_decoder_kernel(self.self_attn, mlp, norms)
            parts = [part for part in (self.self_attn, mlp, *norms) if part is not None]
            self._hooks = hooks_of(module for part in parts for module in part.modules())
            self._is_laid_out = True
        return None if any(self._hooks) else self._kernel

    def in_one_call(
        self, x: torch.Tensor, angles: Angles | None, cache: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """As `DecoderKernel.forward`. cache: transformers' own, with which it does not go."""
        kernel = None if angles is None or cache is not None else self.kernel()
        if kernel is None:
            return None
        assert angles is not None
        return kernel.forward(x, self.self_attn.whole_angles(angles))


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
        super().__init__()
        self.tells_scores = tells_scores
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


class SandwichLayer(OneCallLayer):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))): sandwich normalisation (CogView,
    Ding et al., 2021)."""

    def __init__(self, layer: Any, attention: FusedAttention, mlp: GatedMLP) -> None:
        """layer: of Gemma 3's kind; attention, mlp: what takes the place of its own."""
        super().__init__()
        self.input_layernorm = _norm(layer.input_layernorm)
        self.self_attn = attention
        self.post_attention_layernorm = _norm(layer.post_attention_layernorm)
        self.pre_feedforward_layernorm = _norm(layer.pre_feedforward_layernorm)
        self.mlp = mlp
        self.post_feedforward_layernorm = _norm(layer.post_feedforward_layernorm)
        if hasattr(layer, "attention_type"):
            self.attention_type = layer.attention_type  # the model reads it

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
        normed = self.pre_feedforward_layernorm(x)
        return x + self.post_feedforward_layernorm(self.mlp(normed))  # type: ignore[no-any-return]

    def kernel_parts(self) -> tuple[GatedMLP | None, LayerNorms]:
        return self.mlp, LayerNorms(
            self.input_layernorm,
            self.pre_feedforward_layernorm,
            self.post_attention_layernorm,
            self.post_feedforward_layernorm,
        )


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


def _norm(module: torch.nn.Module) -> torch.nn.Module:
    return fuse_norm(module) or module
