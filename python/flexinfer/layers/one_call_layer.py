"""OneCallLayer: a decoder layer that is one call of our own kernel where it can be."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from flexinfer.attention.hook import step_in_force
from flexinfer.layers.attention import Angles, FusedAttention
from flexinfer.layers.decoder_kernel import DecoderKernel, LayerNorms, make_decoder_kernel
from flexinfer.layers.mlp import GatedMLP
from flexinfer.layers.recognise import hooks_of


class OneCallLayer(torch.nn.Module, ABC):
    """Its parts are called one by one where it cannot, to the same bits."""

    runs_parts = False
    """Whether the parts are called one by one where one call would do: for who watches them."""
    self_attn: FusedAttention

    def __init__(self, layer: Any) -> None:
        """layer: what it takes the place of."""
        super().__init__()
        if hasattr(layer, "attention_type"):
            self.attention_type = layer.attention_type  # the model reads it
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
