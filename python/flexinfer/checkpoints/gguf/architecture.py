"""Architecture: which model of transformers the GGUF files of one name have, and how they say so.

Each is in families/. Source: conversion/ and src/models/ of llama.cpp, gguf/tensor_mapping.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flexinfer.checkpoints.gguf.sources import Source
from flexinfer.checkpoints.gguf.values import GgufValues

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""llama.cpp's name of a part -> transformers'."""
SHARED_EXPERTS = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
"""As NAMES, of experts that all tokens go to."""
EXPERTS = {
    "ffn_gate_exps": ("gate_proj",),
    "ffn_up_exps": ("up_proj",),
    "ffn_down_exps": ("down_proj",),
    "ffn_gate_up_exps": ("gate_proj", "up_proj"),
}
"""llama.cpp's name of the weights of all experts of a layer -> which part of theirs they are, or
which parts one behind the other."""
Convert = Callable[[dict[str, Source], Any], None]
"""Undoes something that llama.cpp's converter does to the weights of a model of this config, under
the model's names: takes sources of the file out, and puts others in their place."""
BLOCK = re.compile(r"blk\.([0-9]+)\.(.+)")
"""llama.cpp's name of a tensor of one layer: its number; the part, and weight or bias, which few
have not."""


def of_equal_width(values: GgufValues) -> dict[str, Any]:
    """Experts as wide as the MLPs of other models. Weights of a token's experts add up to 1."""
    values.mlp_width("expert_feed_forward_length")
    count, used = values.count("expert_count"), values.count("expert_used_count")
    return {"num_local_experts": count, "num_experts_per_tok": used, "sliding_window": None}


@dataclass(frozen=True, slots=True)
class Architecture:
    """How llama.cpp writes the models of one transformers class."""

    config: str | Callable[[GgufValues], str] | None
    """Name of the config's class, or which of several a file has; None: there is none without
    experts."""
    experts_config: str | Callable[[GgufValues], str] | None = None
    """Likewise, of models with experts."""
    conversions: tuple[Convert, ...] = ()
    """One after the other."""
    experts: str = "mlp.experts"
    """Where the experts of a layer are."""
    names: Mapping[str, str] = field(default_factory=dict)
    """As NAMES, of parts that others have not, or elsewhere; of a part with ".weight" or ".bias",
    or of one that has neither in the file, the whole name."""
    keys: frozenset[str] = frozenset()
    """Of values that others have not, or that the settings read in a way of their own."""
    tensors: frozenset[str] = frozenset()
    """Those that belong to the config."""
    rotates_all: bool = True
    """Whether all numbers of a head are rotated."""
    has_gates: bool = False
    """Whether the rows of each head's queries are followed by as many of gates."""
    settings: Callable[[GgufValues], dict[str, Any]] = lambda _: {}
    """What the config has beside, or in place of, that of others."""
    expert_settings: Callable[[GgufValues], dict[str, Any]] = of_equal_width
    """What the config of models with experts has besides, before the settings."""

    def weight_name(self, name: str) -> str | None:
        """What transformers calls the weight that the file calls `name`; None: there is none."""
        layer = ""
        if block := BLOCK.fullmatch(name):
            layer, name = f"model.layers.{block[1]}.", block[2]
        part, _, ending = name.rpartition(".")
        if (whole := self.names.get(name)) is not None:
            return layer + whole
        own = self.names.get(part, NAMES.get(part))
        return None if own is None else f"{layer}{own}.{ending}"

    def experts_name(self, name: str) -> tuple[str, tuple[str, ...]] | None:
        """The module of the experts that the file calls `name`, and the parts; None: it is no
        such."""
        block = BLOCK.fullmatch(name)
        part, _, ending = ("", "", "") if block is None else block[2].rpartition(".")
        if block is None or part not in EXPERTS or ending != "weight":
            return None
        return f"model.layers.{block[1]}.{self.experts}", EXPERTS[part]
