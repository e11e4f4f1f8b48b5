"""The architectures of GGUF files that are known here: which model of transformers each is, and how
the file says so. Source: conversion/ and src/models/ of llama.cpp, gguf/tensor_mapping.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flexinfer.checkpoints.gguf_header import GgufHeader
from flexinfer.checkpoints.gguf_values import GgufValues
from flexinfer.errors import UnsupportedModelError

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
NORMS_BEHIND = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
NORMS_ON_BOTH_SIDES = NORMS_BEHIND | {"ffn_norm": "pre_feedforward_layernorm"}
JOINED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
"""Queries, keys and values are one weight, and so are gates and what they multiply."""
OF_GPT_OSS = {
    "attn_sinks.weight": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
"""llama.cpp's name of the weights of all experts of a layer -> which part of theirs they are."""
BIAS_HALVES = ("ffn_gate_exps.bias", "ffn_up_exps.bias")
"""llama.cpp's names of the halves of a bias that is one, [experts, 2 * hidden], in the model: a
number of the first, one of the second, and so on."""
BLOCK = re.compile(r"blk\.([0-9]+)\.(\w+)\.(\w+)")
"""llama.cpp's name of a tensor of one layer: its number, the part, weight or bias."""
WINDOW, WINDOW_PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
WINDOW_BASE = "rope.freq_base_swa"
ORIGINAL = "rope.scaling.original_context_length"
ROTATED = "rope.dimension_count"
SCORE_FACTOR = "rope.scaling.attn_factor"
BETAS = {"rope.scaling.yarn_beta_fast": "beta_fast", "rope.scaling.yarn_beta_slow": "beta_slow"}
"""Keys of rotations that yarn leaves as they are, and of those that it stretches wholly -> names of
the config."""
LONG_ROPE = ("rope_factors_short.weight", "rope_factors_long.weight")
SCORE_CAP, LOGIT_CAP = "attn_logit_softcapping", "final_logit_softcapping"
FACTORS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
"""Of Granite: keys -> names of the config."""


def _windows(values: GgufValues, pattern: int) -> dict[str, Any]:
    """Of so many layers the last one has no window, where the file does not say it of each."""
    layers = range(values.count("block_count"))
    windows = values.of_layers(WINDOW_PATTERN)
    if windows is None:
        pattern = values.count(WINDOW_PATTERN, pattern)
        windows = [(layer + 1) % pattern != 0 for layer in layers]
    if len(windows) != len(layers):
        values.refuse(WINDOW_PATTERN, f"a number, or one for each of {len(layers)} layers")
    kinds = ["sliding_attention" if has_window else "full_attention" for has_window in windows]
    return {"sliding_window": values.count(WINDOW, 4096), "layer_types": kinds}


def _scale_of_queries(values: GgufValues, layers_of_largest: int) -> dict[str, Any]:
    """The largest of the models scales them by another width than that of its heads. The file does
    not say so: llama.cpp knows it by its number of layers."""
    width, heads = values.count("embedding_length"), values.count("attention.head_count")
    if values.count("block_count") == layers_of_largest:
        return {"query_pre_attn_scalar": width // heads}
    return {"query_pre_attn_scalar": values.count("attention.key_length", width // heads)}


def _gemma2(values: GgufValues) -> dict[str, Any]:
    return {
        **_windows(values, 2),
        **_scale_of_queries(values, 46),
        "attn_logit_softcapping": values.factor(SCORE_CAP, 50.0),
        "final_logit_softcapping": values.factor(LOGIT_CAP, 30.0),
    }


def _gemma3(values: GgufValues) -> dict[str, Any]:
    """Layers with a window rotate by a base of their own, and are not stretched. A file without
    windows, or with windows of 0, has none in any layer."""
    full = {"layer_types": ["full_attention"] * values.count("block_count")}
    base = values.factor(WINDOW_BASE, 1e4)
    return {
        **(_windows(values, 6) if values.get(WINDOW) else full),
        **_scale_of_queries(values, 62),
        "final_logit_softcapping": values.factor(LOGIT_CAP) if values.get(LOGIT_CAP) else None,
        "rope_parameters": {
            "full_attention": rope_of(values),
            "sliding_attention": {"rope_type": "default", "rope_theta": base},
        },
    }


def _granite(values: GgufValues) -> dict[str, Any]:
    """A file leaves out what is 1, and the scale of scores where it is that of others. Without
    rotary embeddings, as some are, transformers has no such model."""
    if values.get("rope.scaling.finetuned", True) is False:
        values.refuse("rope.scaling.finetuned", "true")
    width, heads = values.count("embedding_length"), values.count("attention.head_count")
    usual = {"attention.scale": values.count("attention.key_length", width // heads) ** -0.5}
    return {name: values.factor(key, usual.get(key, 1.0)) for key, name in FACTORS.items()}


def _gpt_oss(values: GgufValues) -> dict[str, Any]:
    """The converter leaves out that rotations are not cut off at whole numbers, as published models
    of this kind say; llama.cpp cuts them off."""
    values.need(WINDOW)
    rope = rope_of(values)
    uncut = {"truncate": False} if rope["rope_type"] == "yarn" else {}
    return {**_windows(values, 2), "rope_parameters": rope | uncut}


def _phi3(values: GgufValues) -> dict[str, Any]:
    """As transformers has it, a window is kept to; llama.cpp reads it and attends to all. With
    factors for long contexts the first of them serve, up to the original length."""
    settings: dict[str, Any] = {
        "sliding_window": values.count(WINDOW) if values.get(WINDOW) else None
    }
    width = values.count("embedding_length") // values.count("attention.head_count")
    rotated = values.count(ROTATED, width) / values.count("attention.key_length", width)
    rope = rope_of(values) | {"partial_rotary_factor": rotated}
    short, long = (values.tensor(name) for name in LONG_ROPE)
    if short is not None and long is not None:
        original = values.count(ORIGINAL)
        settings["original_max_position_embeddings"] = original
        rope |= {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        rope |= {"original_max_position_embeddings": original}
        if values.get(SCORE_FACTOR) is not None:
            rope["attention_factor"] = values.factor(SCORE_FACTOR)
    return settings | {"rope_parameters": rope}


def rope_of(values: GgufValues) -> dict[str, Any]:
    """The config's rope_parameters."""
    parameters = {"rope_type": "default", "rope_theta": values.factor("rope.freq_base", 1e4)}
    # A factor alone is of linear scaling, and one of 0 of none, as llama.cpp reads it.
    unsaid = "linear" if values.get("rope.scaling.factor") else "none"
    kind = values.get("rope.scaling.type", unsaid)
    if kind == "linear":
        return parameters | {"rope_type": kind, "factor": values.factor("rope.scaling.factor")}
    if kind == "yarn":
        betas = {name: key for key, name in BETAS.items() if values.get(key) is not None}
        return parameters | {
            "rope_type": kind,
            "factor": values.factor("rope.scaling.factor"),
            "original_max_position_embeddings": values.count(ORIGINAL),
            **{name: values.factor(key) for name, key in betas.items()},
        }
    if kind != "none":
        values.refuse("rope.scaling.type", "none, linear and yarn")
    return parameters


@dataclass(frozen=True, slots=True)
class Architecture:
    """How llama.cpp writes the models of one transformers class."""

    config: str | None
    """Name of the config's class; None: there is none without experts."""
    rotates_pairs: bool = False
    """Rows of queries and keys lie in the order in which neighbours are rotated together."""
    experts_config: str | None = None
    """Name of the config's class of models with experts."""
    adds_one_to_norms: bool = False
    """Weights of norms are what is multiplied with, which is one more than in the model."""
    names: Mapping[str, str] = field(default_factory=dict)
    """As NAMES, of parts that others have not, or elsewhere; of a part with ".weight" or ".bias"
    the whole name."""
    keys: frozenset[str] = frozenset()
    """Of values that others have not."""
    tensors: frozenset[str] = frozenset()
    """Those that belong to the config."""
    rotates_all: bool = True
    """Whether all numbers of a head are rotated."""
    settings: Callable[[GgufValues], dict[str, Any]] = lambda _: {}
    """What the config has beside, or in place of, that of others."""

    def weight_name(self, name: str) -> str | None:
        """What transformers calls the weight that the file calls `name`; None: there is none."""
        if block := BLOCK.fullmatch(name):
            layer, part, ending = f"model.layers.{block[1]}.", block[2], block[3]
        else:
            layer, (part, _, ending) = "", name.rpartition(".")
        if (whole := self.names.get(f"{part}.{ending}")) is not None:
            return layer + whole
        own = self.names.get(part, NAMES.get(part))
        return None if own is None else f"{layer}{own}.{ending}"


ARCHITECTURES = {
    "llama": Architecture("LlamaConfig", rotates_pairs=True, experts_config="MixtralConfig"),
    "qwen2": Architecture("Qwen2Config"),
    "qwen3": Architecture("Qwen3Config"),
    "qwen3moe": Architecture(None, experts_config="Qwen3MoeConfig"),
    "smollm3": Architecture("SmolLM3Config", rotates_pairs=True),
    "granite": Architecture(
        "GraniteConfig", rotates_pairs=True, keys=frozenset(FACTORS), settings=_granite
    ),
    "olmo2": Architecture("Olmo2Config", names=NORMS_BEHIND),
    "phi3": Architecture(
        "Phi3Config",
        names=JOINED,
        keys=frozenset({WINDOW, SCORE_FACTOR}),
        tensors=frozenset(LONG_ROPE),
        settings=_phi3,
        rotates_all=False,
    ),
    "gpt-oss": Architecture(
        None,
        experts_config="GptOssConfig",
        names=OF_GPT_OSS,
        keys=frozenset({WINDOW, WINDOW_PATTERN}),
        settings=_gpt_oss,
    ),
    "gemma": Architecture("GemmaConfig", adds_one_to_norms=True),
    "gemma2": Architecture(
        "Gemma2Config",
        adds_one_to_norms=True,
        names=NORMS_ON_BOTH_SIDES,
        keys=frozenset({WINDOW, WINDOW_PATTERN, SCORE_CAP, LOGIT_CAP}),
        settings=_gemma2,
    ),
    "gemma3": Architecture(
        "Gemma3TextConfig",
        adds_one_to_norms=True,
        names=NORMS_ON_BOTH_SIDES,
        keys=frozenset({WINDOW, WINDOW_PATTERN, WINDOW_BASE, LOGIT_CAP}),
        settings=_gemma3,
    ),
}


def architecture_of(header: GgufHeader) -> Architecture:
    """Raises UnsupportedModelError for one that is not known."""
    found = ARCHITECTURES.get(header.architecture)
    if found is None:
        raise UnsupportedModelError(
            f"{header.path!r} is a GGUF file of the architecture {header.architecture!r}; known "
            f"are {', '.join(ARCHITECTURES)}"
        )
    return found


def experts_name(name: str) -> tuple[str, str] | None:
    """The module of the experts that the file calls `name`, and the part; None: it is no such."""
    block = BLOCK.fullmatch(name)
    if block is None or block[2] not in EXPERTS or block[3] != "weight":
        return None
    return f"model.layers.{block[1]}.mlp.experts", EXPERTS[block[2]]


def bias_half(name: str) -> tuple[str, int] | None:
    """The bias of experts whose half the file calls `name`, and which half; None: it is no such."""
    block = BLOCK.fullmatch(name)
    ending = "" if block is None else f"{block[2]}.{block[3]}"
    if block is None or ending not in BIAS_HALVES:
        return None
    return f"model.layers.{block[1]}.mlp.experts.gate_up_proj_bias", BIAS_HALVES.index(ending)
