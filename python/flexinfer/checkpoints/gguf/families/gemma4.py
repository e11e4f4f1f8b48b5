"""Gemma 4: layers with windows have heads of another width, some take keys and values of others;
and some models have embeddings of each layer. With experts each layer has an MLP beside them.
"""

from __future__ import annotations

from typing import Any

from flexinfer.checkpoints.gguf.architecture import Architecture
from flexinfer.checkpoints.gguf.experts import WIDTH as EXPERT_WIDTH
from flexinfer.checkpoints.gguf.families.gemma import LOGIT_CAP, NORMS_ON_BOTH_SIDES, OTHER_BASE
from flexinfer.checkpoints.gguf.hybrid import KV_HEADS
from flexinfer.checkpoints.gguf.rope import (
    ROTATED,
    WINDOW,
    WINDOW_BASE,
    WINDOW_PATTERN,
    rope_of_kinds,
    windows_of,
)
from flexinfer.checkpoints.gguf.values import GgufValues

WIDTH = "feed_forward_length"
KEY_WIDTH, VALUE_WIDTH = "attention.key_length", "attention.value_length"
OF_WINDOWS = "_swa"
"""Ending of the keys of layers with a window."""
SHARED, EMBEDDED = "attention.shared_kv_layers", "embedding_length_per_layer_input"
EMBEDDINGS, FACTORS = "per_layer_token_embd", "rope_freqs.weight"
UNROTATED = 1e30
"""What frequencies are divided by of numbers that are not rotated."""
OF_EACH_LAYER = NORMS_ON_BOTH_SIDES | {
    EMBEDDINGS: "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
OF_EXPERTS = {
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
"""What an expert's output is multiplied with, the model multiplies its weight in a token with."""
NAMES = OF_EACH_LAYER | OF_EXPERTS | {"layer_output_scale.weight": "layer_scalar"}
KEYS = {
    *(KV_HEADS, WIDTH, SHARED, EMBEDDED, WINDOW, WINDOW_PATTERN, WINDOW_BASE, LOGIT_CAP),
    *(f"{key}{OF_WINDOWS}" for key in (KEY_WIDTH, VALUE_WIDTH, ROTATED)),
}


def _gemma4(values: GgufValues) -> dict[str, Any]:
    """Logits of a model without a cap have none, and llama.cpp caps them by 30."""
    windows = windows_of(values, 6)
    kinds = windows["layer_types"]
    if kinds[-1] != "full_attention":
        values.refuse(WINDOW_PATTERN, "models whose last layer has no window")
    return {
        **windows,
        **_heads_of(values, kinds),
        **_widths_of(values, len(kinds)),
        "final_logit_softcapping": values.factor(LOGIT_CAP) if values.get(LOGIT_CAP) else None,
        "rope_parameters": _rotations_of(values),
    }


def _experts(values: GgufValues) -> dict[str, Any]:
    return {
        "enable_moe_block": True,
        "num_experts": values.count("expert_count"),
        "top_k_experts": values.count("expert_used_count"),
        "moe_intermediate_size": values.count(EXPERT_WIDTH),
    }


def shared_layers(values: GgufValues) -> int:
    """How many of the last layers take keys and values of others."""
    count, num_shared = values.count("block_count"), values.get(SHARED, 0)
    if type(num_shared) is not int or not 0 <= num_shared < count:
        values.refuse(SHARED, f"whole numbers from 0 on, less than the block_count, {count}")
    return num_shared


def _heads_of(values: GgufValues, kinds: list[str]) -> dict[str, Any]:
    """Layers without a window that have no values take their keys for these."""
    count, num_shared = len(kinds), shared_layers(values)
    of_each = values.of_layers(KV_HEADS) or [values.count(KV_HEADS)] * count
    heads = {*zip(kinds, of_each, strict=False)}
    if len(of_each) != count or len(heads) > len({*kinds}):
        values.refuse(KV_HEADS, "one number for layers with a window, one for those without")
    full = dict(heads)["full_attention"]
    windowed = dict(heads).get("sliding_attention", full)
    own = [layer for layer in range(count - num_shared) if kinds[layer] == "full_attention"]
    lack = {not values.has_tensor(f"blk.{layer}.attn_v.weight") for layer in own}
    if len(lack) > 1 or (full != windowed and lack == {False}):
        values.refuse(KV_HEADS, "values in all layers, or in none without a window")
    widths = {}
    for ending in ("", OF_WINDOWS):
        widths[ending] = values.count(f"{KEY_WIDTH}{ending}")
        for key in (VALUE_WIDTH, ROTATED):
            values.equal(f"{key}{ending}", widths[ending], "the width of keys", widths[ending])
    return {
        "num_attention_heads": values.count("attention.head_count"),
        "num_key_value_heads": windowed,
        "num_global_key_value_heads": full,
        "head_dim": widths[OF_WINDOWS],
        "global_head_dim": widths[""],
        "attention_k_eq_v": lack == {True},
        "num_kv_shared_layers": num_shared,
    }


def _widths_of(values: GgufValues, count: int) -> dict[str, Any]:
    """Of MLPs, which may be twice as wide in layers with keys and values of others; and of
    embeddings."""
    of_each = values.of_layers(WIDTH) or [values.count(WIDTH)] * count
    shared = values.get(SHARED, 0)
    first = of_each[: count - shared]
    is_double = shared > 0 and of_each[-1] != first[0]
    wanted = [first[0]] * len(first) + [first[0] * (2 if is_double else 1)] * shared
    if of_each != wanted or type(first[0]) is not int or first[0] < 1:
        values.refuse(WIDTH, "one width, or twice that in layers that share keys and values")
    rows = values.shape(f"{EMBEDDINGS}.weight")
    embedded = values.count(EMBEDDED) if values.get(EMBEDDED, 0) else 0
    return {
        "intermediate_size": first[0],
        "use_double_wide_mlp": is_double,
        "hidden_size_per_layer_input": embedded,
        **({} if rows is None else {"vocab_size_per_layer_input": rows[0]}),
    }


def _rotations_of(values: GgufValues) -> dict[str, Any]:
    """Without a window only some of a head's numbers are rotated, which the file says by factors of
    their frequencies: 1, and for the others one that makes nothing of them."""
    kinds = rope_of_kinds(values, OTHER_BASE)
    full = kinds["full_attention"]
    if full["rope_type"] != "default":
        values.refuse("rope.scaling.type", "none")
    factors = values.tensor(FACTORS) or [1.0] * (values.count(KEY_WIDTH) // 2)
    rotated = factors.count(1.0)
    if any(factor < UNROTATED * 0.99 for factor in factors[rotated:]) or not rotated:
        values.refuse(KEY_WIDTH, f"factors of frequencies ({FACTORS}) that are 1, then {UNROTATED}")
    values.equal(KEY_WIDTH, 2 * len(factors), f"twice the factors in {FACTORS}")
    part = {"rope_type": "proportional", "partial_rotary_factor": rotated / len(factors)}
    return kinds | {"full_attention": full | part}


GEMMA4 = {
    "gemma4": Architecture(
        "Gemma4TextConfig",
        experts_config="Gemma4TextConfig",
        experts="experts",
        names=NAMES,
        keys=frozenset(KEYS),
        tensors=frozenset({FACTORS}),
        settings=_gemma4,
        expert_settings=_experts,
    ),
}
