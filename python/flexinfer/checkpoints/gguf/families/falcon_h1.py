"""Falcon-H1: attention beside Mamba-2 in each layer.

The many factors of its configs are in the weights of a file, where the converter put them, and in
the model that is made of it they are all 1.
"""

from __future__ import annotations

from typing import Any

from flexinfer.checkpoints.gguf import mamba
from flexinfer.checkpoints.gguf.architecture import Architecture
from flexinfer.checkpoints.gguf.conversions import one_input
from flexinfer.checkpoints.gguf.values import GgufValues

NAMES = {
    **mamba.names_in("mamba"),
    "output_norm": "model.final_layernorm",
    "ffn_norm": "pre_ff_layernorm.weight",  # called so without .weight
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}


def _settings(values: GgufValues) -> dict[str, Any]:
    """Where the mixers have a norm, it is behind the gate, as llama.cpp has it."""
    return {
        "mamba_d_ssm": values.count(mamba.INNER),
        "mamba_n_heads": values.count(mamba.HEADS),
        "mamba_d_head": mamba.head_dim_of(values),
        "mamba_d_state": values.count(mamba.STATE),
        "mamba_d_conv": values.count(mamba.KERNEL),
        "mamba_n_groups": values.count(mamba.GROUPS),
        "mamba_conv_bias": mamba.has_bias(values),
        "mamba_rms_norm": values.has_tensor("blk.0.ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


FALCON_H1 = {
    "falcon-h1": Architecture(
        "FalconH1Config",
        conversions=(one_input, mamba.undo_mamba2),
        names=NAMES,
        keys=mamba.KEYS,
        settings=_settings,
    )
}
