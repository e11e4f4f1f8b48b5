"""Granite: as Llama, with factors; Granite SWA with windows, sinks and layers without rotation;
Granite 4, most of whose layers are Mamba-2."""

from __future__ import annotations

from typing import Any

from flexinfer.checkpoints.gguf import mamba
from flexinfer.checkpoints.gguf.architecture import Architecture
from flexinfer.checkpoints.gguf.conversions import join, one_input, part_pairs
from flexinfer.checkpoints.gguf.experts import SHARED_WIDTH
from flexinfer.checkpoints.gguf.hybrid import KV_HEADS, attending, heads_of
from flexinfer.checkpoints.gguf.rope import WINDOW, WINDOW_PATTERN, rope_of, windows_of
from flexinfer.checkpoints.gguf.sources import Source
from flexinfer.checkpoints.gguf.values import GgufValues

ROTATED_LAYERS = "attention.rope_pattern"
FACTORS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
"""Keys -> names of the config."""
ROTATES = "rope.scaling.finetuned"
HALVES = ("shared_mlp.gate", "shared_mlp.up")
MLP = {"gate": HALVES[0], "up": HALVES[1], "down": "shared_mlp.output_linear"}
NAMES = {
    **{f"ffn_{part}": name for part, name in MLP.items()},
    **{f"ffn_{part}_shexp": name for part, name in MLP.items()},
    "ffn_gate_inp": "block_sparse_moe.router",
}
"""What all tokens pass is the MLP of models without experts, and stands beside those of others."""


def _factors(values: GgufValues) -> dict[str, Any]:
    """A file leaves out what is 1, and the scale of scores where it is that of others."""
    width, heads = values.count("embedding_length"), values.count("attention.head_count")
    usual = {"attention.scale": values.count("attention.key_length", width // heads) ** -0.5}
    return {name: values.factor(key, usual.get(key, 1.0)) for key, name in FACTORS.items()}


def _rotating(values: GgufValues) -> dict[str, Any]:
    """Without rotary embeddings, as some are, transformers has no such model. Those of Granite 4
    in which all layers attend say of Mamba-2, too, which none has."""
    if not values.flag(ROTATES, True):
        values.refuse(ROTATES, "true")
    return _factors(values)


def _dense(values: GgufValues) -> dict[str, Any]:
    """Granite 4 calls its MLPs shared by experts that are not there."""
    values.mlp_width(SHARED_WIDTH)
    return _rotating(values)


def _experts(values: GgufValues) -> dict[str, Any]:
    return {
        "num_local_experts": values.count("expert_count"),
        "num_experts_per_tok": values.count("expert_used_count"),
        "shared_intermediate_size": values.count(SHARED_WIDTH) if values.get(SHARED_WIDTH) else 0,
    }


def _hybrid(values: GgufValues) -> dict[str, Any]:
    attends = attending(values)
    return {
        **_factors(values),
        **heads_of(values),
        "layer_types": ["full_attention" if own else "linear_attention" for own in attends],
        "position_embedding_type": "rope" if values.flag(ROTATES, True) else None,
        "attention_bias": values.has_tensor(f"blk.{attends.index(True)}.attn_q.bias"),
        "mamba_n_heads": values.count(mamba.HEADS),
        "mamba_d_head": mamba.head_dim_of(values),
        "mamba_d_state": values.count(mamba.STATE),
        "mamba_d_conv": values.count(mamba.KERNEL),
        "mamba_n_groups": values.count(mamba.GROUPS),
        "mamba_expand": mamba.expansion_of(values),
        "mamba_conv_bias": mamba.has_bias(values),
        **_mlp(values),
    }


def _mlp(values: GgufValues) -> dict[str, Any]:
    if values.get("expert_count", 0):
        return {"shared_intermediate_size": values.count(SHARED_WIDTH)}
    width = values.mlp_width(SHARED_WIDTH)
    return {"shared_intermediate_size": width, "num_local_experts": 0, "num_experts_per_tok": 0}


def _join_halves(sources: dict[str, Source], config: Any) -> None:
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        halves = [f"{prefix}{half}.weight" for half in HALVES]
        join(sources, halves, f"{prefix}shared_mlp.input_linear.weight")


def _with_windows(values: GgufValues) -> dict[str, Any]:
    """A base of 0 is that of a layer that is not rotated."""
    settings, layers = _rotating(values), range(values.count("block_count"))
    if values.of_layers(WINDOW_PATTERN) is None:
        values.refuse(WINDOW_PATTERN, "one for each layer")
    rotates = values.of_layers(ROTATED_LAYERS) or [True for _ in layers]
    if len(rotates) != len(layers):
        values.refuse(ROTATED_LAYERS, f"one for each of {len(layers)} layers")
    values.need(WINDOW)
    base = rope_of(values)["rope_theta"]
    bases = [base if is_rotated else 0.0 for is_rotated in rotates]
    return {**settings, **windows_of(values, 1), "layer_rope_theta": bases}


GRANITE = {
    "granite_swa": Architecture(
        "GraniteSWAConfig",
        conversions=(part_pairs,),
        names={"attn_sinks.weight": "self_attn.sinks"},
        keys=frozenset({*FACTORS, WINDOW, WINDOW_PATTERN, ROTATED_LAYERS}),
        settings=_with_windows,
    ),
    "granite": Architecture(
        "GraniteConfig",
        conversions=(part_pairs,),
        keys=frozenset({*FACTORS, *mamba.KEYS, SHARED_WIDTH}),
        settings=_dense,
    ),
    "granitemoe": Architecture(
        None,
        experts_config="GraniteMoeSharedConfig",
        conversions=(part_pairs, _join_halves),
        experts="block_sparse_moe.experts",
        names=NAMES,
        keys=frozenset({*FACTORS, *mamba.KEYS, SHARED_WIDTH}),
        settings=_rotating,
        expert_settings=_experts,
    ),
    "granitehybrid": Architecture(
        "GraniteMoeHybridConfig",
        experts_config="GraniteMoeHybridConfig",
        conversions=(part_pairs, one_input, mamba.undo_mamba2, _join_halves),
        experts="block_sparse_moe.experts",
        names=NAMES | mamba.names_in("mamba"),
        keys=frozenset({*FACTORS, *mamba.KEYS, KV_HEADS, SHARED_WIDTH}),
        settings=_hybrid,
    ),
}
