"""Jamba: Mamba, attention without rotations in some layers, and experts in some."""

from __future__ import annotations

from typing import Any

from flexinfer.checkpoints.gguf import mamba
from flexinfer.checkpoints.gguf.architecture import Architecture
from flexinfer.checkpoints.gguf.conversions import one_input
from flexinfer.checkpoints.gguf.hybrid import KV_HEADS, attending, heads_of
from flexinfer.checkpoints.gguf.values import GgufValues

NAMES = {
    **mamba.names_in("mamba"),
    "ssm_x": "mamba.x_proj",
    "ssm_dt": "mamba.dt_proj",
    "ssm_dt.bias": "mamba.dt_proj.bias",
    "ssm_dt_norm": "mamba.dt_layernorm",
    "ssm_b_norm": "mamba.b_layernorm",
    "ssm_c_norm": "mamba.c_layernorm",
    "output_norm": "model.final_layernorm",
    "ffn_norm": "pre_ff_layernorm",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
    "ffn_gate_inp": "feed_forward.router",
}


def _settings(values: GgufValues) -> dict[str, Any]:
    attends = attending(values)
    heads = heads_of(values, rotates=False)
    places = _places(attends)
    if places is None:
        values.refuse(KV_HEADS, "heads in layers that lie equally far apart")
    return {
        **heads,
        "rope_parameters": None,
        "attn_layer_period": places[0],
        "attn_layer_offset": places[1],
        "mamba_d_state": values.count(mamba.STATE),
        "mamba_d_conv": values.count(mamba.KERNEL),
        "mamba_dt_rank": values.count(mamba.HEADS),
        "mamba_expand": mamba.expansion_of(values),
        "mamba_conv_bias": mamba.has_bias(values),
        **_experts(values),
    }


def _experts(values: GgufValues) -> dict[str, Any]:
    """One expert is none: an MLP."""
    layers = range(values.count("block_count"))
    names = (f"blk.{layer}.ffn_gate_inp.weight" for layer in layers)
    has_experts = [values.has_tensor(name) for name in names]
    places = _places(has_experts)
    if not any(has_experts):
        return {"num_experts": 1, "num_experts_per_tok": 1}
    if places is None:
        values.refuse("expert_count", "experts in layers that lie equally far apart")
    return {
        "num_experts": values.count("expert_count"),
        "num_experts_per_tok": values.count("expert_used_count"),
        "expert_layer_period": places[0],
        "expert_layer_offset": places[1],
    }


def _places(are_there: list[bool]) -> tuple[int, int] | None:
    """How far layers lie apart, and which is the first; None: not equally far."""
    if True not in are_there:
        return None
    first = are_there.index(True)
    for period in range(first + 1, len(are_there) + 1):
        if all((i % period == first) == own for i, own in enumerate(are_there)):
            return period, first
    return None


JAMBA = {
    "jamba": Architecture(
        "JambaConfig",
        experts_config="JambaConfig",
        conversions=(one_input, mamba.undo_mamba),
        experts="feed_forward.experts",
        names=NAMES,
        keys=mamba.KEYS - {mamba.GROUPS} | {KV_HEADS},
        settings=_settings,
        expert_settings=lambda _: {},
    )
}
