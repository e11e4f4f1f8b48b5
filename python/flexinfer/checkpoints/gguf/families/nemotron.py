"""Nemotron-H: each layer is Mamba-2, attention without rotations, or an MLP. In Nemotron 3 it is a
mixture of experts, and an MLP beside them.
"""

from __future__ import annotations

from typing import Any

from flexinfer.checkpoints.gguf import mamba
from flexinfer.checkpoints.gguf.architecture import Architecture
from flexinfer.checkpoints.gguf.conversions import one_input, part_pairs
from flexinfer.checkpoints.gguf.experts import (
    DEEPSEEK_KEYS,
    DENSE,
    SHARED_WIDTH,
    SIGMOID,
    WIDTH,
    deepseek_experts,
    only_gating,
)
from flexinfer.checkpoints.gguf.hybrid import KV_HEADS, attending, heads_of
from flexinfer.checkpoints.gguf.values import GgufValues

WIDTHS = "feed_forward_length"
RMS_EPSILON, EPSILON = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
LATENT_WIDTH = "moe_latent_size"
"""Of what experts get and give in place of a layer's input and output, where the file says it."""
NAMES = {
    **mamba.names_in("mixer"),
    "token_embd": "model.embeddings",
    "output_norm": "model.norm_f",
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
}
OF_EXPERTS = {
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
KEYS = frozenset({*mamba.KEYS, KV_HEADS, WIDTHS, RMS_EPSILON, EPSILON})
KEYS_OF_EXPERTS = DEEPSEEK_KEYS - {DENSE} | {SHARED_WIDTH, LATENT_WIDTH}


def _dense(values: GgufValues) -> dict[str, Any]:
    settings = _settings(values, "mlp")
    first = settings["layers_block_type"].index("mlp")
    has_bias = values.has_tensor(f"blk.{first}.ffn_up.bias")
    return {**settings, "intermediate_size": _width(values), "mlp_bias": has_bias}


def _mixture(values: GgufValues) -> dict[str, Any]:
    only_gating(values, SIGMOID)
    return _settings(values, "moe")


def _experts(values: GgufValues) -> dict[str, Any]:
    """Experts are chosen as in DeepSeek V3."""
    found = deepseek_experts(values)
    del found["first_k_dense_replace"]  # which layers have experts their widths tell
    values.equal(WIDTH, _width(values), "the feed_forward_length")
    latents = values.get(LATENT_WIDTH) is not None
    return {
        **found,
        "moe_shared_expert_intermediate_size": values.count(SHARED_WIDTH),
        "moe_latent_size": values.count(LATENT_WIDTH) if latents else None,
    }


def _width(values: GgufValues) -> int:
    """The one of all MLPs, or of all experts."""
    count, widths = values.count("block_count"), values.of_layers(WIDTHS) or []
    sizes = {width for width in widths if width != 0}
    if len(widths) != count or len(sizes) != 1 or not all(_is_size(w) for w in sizes):
        values.refuse(WIDTHS, f"one for each of {count} layers, 0 or the width of all MLPs")
    width: int = sizes.pop()
    return width


def _settings(values: GgufValues, mlp: str) -> dict[str, Any]:
    """A layer with heads of keys attends, one with a width is an MLP (mlp: of which kind), and one
    with neither has a state. Files have the epsilon of the norms under one name or the other."""
    _width(values)
    attends, layers = attending(values), range(values.num_layers())
    widths = values.of_layers(WIDTHS) or []
    if any(attends[layer] and widths[layer] for layer in layers):
        values.refuse(WIDTHS, "0 in layers that attend")
    kinds = [
        "full_attention" if attends[layer] else mlp if widths[layer] else "linear_attention"
        for layer in layers
    ]
    return {
        **heads_of(values, rotates=False),
        "rope_parameters": None,
        "layers_block_type": kinds,
        "layer_norm_epsilon": values.factor(RMS_EPSILON if values.get(RMS_EPSILON) else EPSILON),
        "attention_bias": values.has_tensor(f"blk.{attends.index(True)}.attn_q.bias"),
        "mamba_num_heads": values.count(mamba.HEADS),
        "mamba_head_dim": mamba.head_dim_of(values),
        "ssm_state_size": values.count(mamba.STATE),
        "conv_kernel": values.count(mamba.KERNEL),
        "n_groups": values.count(mamba.GROUPS),
        "use_conv_bias": mamba.has_bias(values),
    }


def _is_size(width: Any) -> bool:
    return type(width) is int and width > 0


NEMOTRON = {
    "nemotron_h": Architecture(
        "NemotronHConfig",
        conversions=(part_pairs, one_input, mamba.undo_mamba2),
        names=NAMES,
        keys=KEYS,
        settings=_dense,
    ),
    "nemotron_h_moe": Architecture(
        None,
        experts_config="NemotronHConfig",
        conversions=(part_pairs, one_input, mamba.undo_mamba2),
        experts="mixer.experts",
        names=NAMES | OF_EXPERTS,
        keys=KEYS | KEYS_OF_EXPERTS,
        settings=_mixture,
        expert_settings=_experts,
    ),
}
