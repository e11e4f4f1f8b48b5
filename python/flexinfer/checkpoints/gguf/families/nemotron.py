"""Nemotron-H: each layer is Mamba-2, attention without rotations, or an MLP."""

from __future__ import annotations

from typing import Any

from flexinfer.checkpoints.gguf import mamba
from flexinfer.checkpoints.gguf.architecture import Architecture
from flexinfer.checkpoints.gguf.conversions import one_input, part_pairs
from flexinfer.checkpoints.gguf.hybrid import KV_HEADS, attending, heads_of
from flexinfer.checkpoints.gguf.values import GgufValues

WIDTHS = "feed_forward_length"
RMS_NORM, NORM = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
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


def _settings(values: GgufValues) -> dict[str, Any]:
    """A layer with heads of keys attends, one with a width is an MLP, and one with neither has a
    state. Files have the epsilon of the norms under one name or the other."""
    attends, widths = attending(values), values.of_layers(WIDTHS) or []
    sizes = {width for width in widths if width != 0}
    if len(widths) != len(attends) or len(sizes) != 1 or not all(_is_size(w) for w in sizes):
        values.refuse(WIDTHS, f"one for each of {len(attends)} layers, 0 or the width of all MLPs")
    kinds = [_kind(own, width) for own, width in zip(attends, widths, strict=True)]
    if None in kinds:
        values.refuse(WIDTHS, "0 in layers that attend")
    return {
        **heads_of(values, rotates=False),
        "rope_parameters": None,
        "layers_block_type": kinds,
        "intermediate_size": sizes.pop(),
        "layer_norm_epsilon": values.factor(RMS_NORM if values.get(RMS_NORM) else NORM),
        "attention_bias": values.has_tensor(f"blk.{attends.index(True)}.attn_q.bias"),
        "mlp_bias": values.has_tensor(f"blk.{kinds.index('mlp')}.ffn_up.bias"),
        "mamba_num_heads": values.count(mamba.HEADS),
        "mamba_head_dim": mamba.head_dim_of(values),
        "ssm_state_size": values.count(mamba.STATE),
        "conv_kernel": values.count(mamba.KERNEL),
        "n_groups": values.count(mamba.GROUPS),
        "use_conv_bias": mamba.has_bias(values),
    }


def _is_size(width: Any) -> bool:
    return type(width) is int and width > 0


def _kind(attends: bool, width: int) -> str | None:
    """None: of two at once."""
    if attends:
        return None if width else "full_attention"
    return "mlp" if width else "linear_attention"


NEMOTRON = {
    "nemotron_h": Architecture(
        "NemotronHConfig",
        conversions=(part_pairs, one_input, mamba.undo_mamba2),
        names=NAMES,
        keys=frozenset({*mamba.KEYS, KV_HEADS, WIDTHS, RMS_NORM, NORM}),
        settings=_settings,
    )
}
