"""FusedDecoderLayer: a decoder layer whose additions are done by the products before them, and
which is one call of our own kernel where it can be, up to its MLP if that is no gated one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flexinfer.attention.hook import step_in_force
from flexinfer.layers.attention import FusedAttention, fuse_attention
from flexinfer.layers.decoder_kernel import DecoderKernel, make_decoder_kernel
from flexinfer.layers.known import DECODER_LAYERS, DECODER_LAYERS_WITH_SCORES
from flexinfer.layers.mlp import GatedMLP, fuse_mlp
from flexinfer.layers.norm import fuse_norm
from flexinfer.layers.recognise import hooks_of, is_known


class FusedDecoderLayer(torch.nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    runs_parts = False
    """Whether the parts are called one by one where one call would do: for who watches them."""

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
        self._kernel: DecoderKernel | None = None
        self._hooks: list[Mapping[int, Any]] = []
        """Those of the parts that the kernel stands for."""
        self._is_laid_out = False

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        cache: Any = None,
        rows: torch.Tensor | None = None,
        past_key_values: Any = None,
        **others: Any,
    ) -> torch.Tensor:
        """hidden_states: [1, tokens, width]. rows: int64, of the tokens, whose output alone is
        wanted: [1, rows, width]; None: all. past_key_values: the cache, as transformers calls it
        before 5.24."""
        cache = past_key_values if cache is None else cache
        if rows is None and position_embeddings is not None and cache is None:
            kernel = self.kernel()
            found = None
            if kernel is not None:
                angles = self.self_attn.whole_angles(position_embeddings)
                found = kernel.forward(hidden_states, angles)
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

    def kernel(self) -> DecoderKernel | None:
        """What may compute it in this step; None: the parts are to be called one by one."""
        if torch.compiler.is_compiling():  # first: the others cannot be traced
            return None
        if self.runs_parts or step_in_force() is None:
            return None
        if not self._is_laid_out:  # by the first step; in a trial it is not yet
            norms = self.input_layernorm, self.post_attention_layernorm
            mlp = self.mlp if isinstance(self.mlp, GatedMLP) else None
            self._kernel = make_decoder_kernel(self.self_attn, mlp, norms)
            parts = (self.self_attn, *norms) if mlp is None else (self.self_attn, *norms, mlp)
            self._hooks = hooks_of(module for part in parts for module in part.modules())
            self._is_laid_out = True
        return None if any(self._hooks) else self._kernel


def fuse_decoder_layer(module: Any) -> FusedDecoderLayer | None:
    """What may take the module's place; None: it is of another kind, or one of its parts is."""
    if not is_known(module, DECODER_LAYERS):
        return None
    attention = fuse_attention(module.self_attn)
    mlp = None if attention is None else fuse_mlp(module.mlp)
    if attention is None or mlp is None:
        return None
    return FusedDecoderLayer(module, attention, mlp)


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
