"""Models with LayerNorm: StarCoder 2, Nemotron, Jais 2, StableLM, Phi 1 and 2."""

from __future__ import annotations

from typing import Any

from flexinfer.checkpoints.gguf.architecture import Architecture
from flexinfer.checkpoints.gguf.conversions import less_one, part_joined
from flexinfer.checkpoints.gguf.rope import partial_rope_of
from flexinfer.checkpoints.gguf.sources import Changed, Source
from flexinfer.checkpoints.gguf.values import GgufValues

EPSILON = "attention.layer_norm_epsilon"
NORM_KEYS = frozenset({EPSILON, "attention.layer_norm_rms_epsilon"})
"""The second is of other norms; it is not read where these are."""
PARALLEL = "use_parallel_residual"
QUERY_BIAS = "blk.0.attn_q.bias"
HEAD_NORMS = {
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
}


def _starcoder2(values: GgufValues) -> dict[str, Any]:
    """Without the window that some published configs have, as llama.cpp computes: the file does not
    say it."""
    return {
        "norm_epsilon": values.factor(EPSILON),
        "use_bias": values.has_tensor(QUERY_BIAS),
        "sliding_window": None,
    }


def _nemotron(values: GgufValues) -> dict[str, Any]:
    return {
        "norm_eps": values.factor(EPSILON),
        "mlp_bias": values.has_tensor("blk.0.ffn_up.bias"),
        "rope_parameters": partial_rope_of(values),
    }


def _jais2(values: GgufValues) -> dict[str, Any]:
    return {
        "layer_norm_eps": values.factor(EPSILON),
        "attention_bias": values.has_tensor(QUERY_BIAS),
        "mlp_bias": values.has_tensor("blk.0.ffn_up.bias"),
    }


def _stablelm(values: GgufValues) -> dict[str, Any]:
    """The MLP is beside attention where it has no norm of its own. A key says so, too, but it is
    true in files of models whose own configs say nothing of it."""
    return {
        "layer_norm_eps": values.factor(EPSILON),
        "use_parallel_residual": not values.has_tensor("blk.0.ffn_norm.weight"),
        "use_qkv_bias": values.has_tensor(QUERY_BIAS),
        "qk_layernorm": values.has_tensor("blk.0.attn_q_norm.weight"),
        "rope_parameters": partial_rope_of(values),
    }


def _part_head_norms(sources: dict[str, Source], config: Any) -> None:
    """Each head has a norm of its own, a row of one tensor in the file."""
    for name in [name for name in sources if name.endswith("_layernorm.weight")]:
        module, (heads, *shape) = name.removesuffix(".weight"), sources[name].shape
        if not name.endswith(("q_layernorm.weight", "k_layernorm.weight")) or not shape:
            continue
        norms = sources.pop(name)
        for head in range(heads):
            row = Changed(lambda rows, head=head: rows[head], norms, shape=tuple(shape))
            sources[f"{module}.norms.{head}.weight"] = row


def _phi2(values: GgufValues) -> dict[str, Any]:
    return {"layer_norm_eps": values.factor(EPSILON), "rope_parameters": partial_rope_of(values)}


LAYER_NORM = {
    "starcoder2": Architecture(
        "Starcoder2Config",
        names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        keys=NORM_KEYS,
        settings=_starcoder2,
    ),
    "nemotron": Architecture(
        "NemotronConfig",
        conversions=(less_one,),
        keys=NORM_KEYS,
        settings=_nemotron,
        rotates_all=False,
    ),
    "jais2": Architecture("Jais2Config", keys=NORM_KEYS, settings=_jais2),
    "stablelm": Architecture(
        "StableLmConfig",
        conversions=(_part_head_norms,),
        names=HEAD_NORMS,
        keys=NORM_KEYS | {PARALLEL},
        settings=_stablelm,
        rotates_all=False,
    ),
    "phi2": Architecture(
        "PhiConfig",
        conversions=(part_joined,),
        names={
            "output_norm": "model.final_layernorm",
            "attn_output": "self_attn.dense",
            "attn_qkv": "self_attn.qkv_proj",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
        keys=NORM_KEYS,
        settings=_phi2,
        rotates_all=False,
    ),
}
