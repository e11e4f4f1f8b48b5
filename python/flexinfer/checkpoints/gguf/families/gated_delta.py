"""Qwen3-Next, Qwen3.5: gated delta nets, and attention with gates in every fourth layer.

A delta net has several value heads for each head of its keys. In the model they stand behind one
another; a file of Qwen3.5 has the first ones of all heads, then the second ones, and so on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from flexinfer.checkpoints.gguf.architecture import Architecture
from flexinfer.checkpoints.gguf.conversions import less_one, one_input
from flexinfer.checkpoints.gguf.experts import SHARED_WIDTH, WIDTH
from flexinfer.checkpoints.gguf.families.llama import NORMS_BEHIND
from flexinfer.checkpoints.gguf.families.mixtures import SHARED_EXPERT, as_row
from flexinfer.checkpoints.gguf.mamba import undo_mamba
from flexinfer.checkpoints.gguf.rope import ROTATED, SECTIONS, partial_rope_of
from flexinfer.checkpoints.gguf.sources import Ordered, OrderedInputs, Source, Woven
from flexinfer.checkpoints.gguf.values import NEXT_LAYERS, GgufValues
from flexinfer.errors import UnsupportedModelError

RECURRENT, INTERVAL = "attention.recurrent_layers", "full_attention_interval"
HEAD_WIDTH, INNER_WIDTH = "ssm.state_size", "ssm.inner_size"
KEY_HEADS, VALUE_HEADS, KERNEL = "ssm.group_count", "ssm.time_step_rank", "ssm.conv_kernel"
KEYS = {ROTATED, RECURRENT, INTERVAL, HEAD_WIDTH, INNER_WIDTH, KEY_HEADS, VALUE_HEADS, KERNEL}
KEYS |= {NEXT_LAYERS, SECTIONS}
"""Sections of positions differ in images alone."""
NET = "linear_attn."
NAMES = NORMS_BEHIND | {
    "attn_qkv": f"{NET}in_proj_qkv",
    "attn_gate": f"{NET}in_proj_z",
    "ssm_a": f"{NET}A_log",
    "ssm_ba": f"{NET}in_proj_ba",
    "ssm_in": f"{NET}in_proj_qkvz",
    "ssm_alpha": f"{NET}in_proj_a",
    "ssm_beta": f"{NET}in_proj_b",
    "ssm_conv1d": f"{NET}conv1d",
    "ssm_dt.bias": f"{NET}dt_bias",
    "ssm_norm": f"{NET}norm",
    "ssm_out": f"{NET}out_proj",
}


def _norms(sources: dict[str, Source], config: Any) -> None:
    """Those inside of the delta nets are as in the model."""
    others = {name: s for name, s in sources.items() if not name.endswith(f"{NET}norm.weight")}
    less_one(others, config)
    sources |= others


def _value_heads(sources: dict[str, Source], config: Any) -> None:
    """Into the order of the model."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    heads = torch.arange(values).view(-1, keys).T.flatten()
    inner = torch.arange(values * config.linear_value_head_dim).view(values, -1)[heads].flatten()
    first = 2 * keys * config.linear_key_head_dim
    behind_keys = torch.cat([torch.arange(first), first + inner])
    parts: dict[str, Callable[[Source], Source]] = {
        "in_proj_qkv.weight": lambda source: Ordered(source, behind_keys),
        "conv1d.weight": lambda source: Ordered(source, behind_keys),
        "in_proj_z.weight": lambda source: Ordered(source, inner),
        "out_proj.weight": lambda source: OrderedInputs(source, inner),
        **dict.fromkeys(
            ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"),
            lambda source: Ordered(source, heads),
        ),
    }
    if keys == values:
        return
    for name, source in sources.items():
        _, _, part = name.partition(NET)
        if part in parts:
            sources[name] = parts[part](source)


def _join_inputs(sources: dict[str, Source], config: Any) -> None:
    """Of a head of keys: its queries, its keys, its values, their gates; then those of the next
    one. Some old files have one weight, too."""
    keys = config.linear_num_key_heads
    first = 2 * keys * config.linear_key_head_dim
    of_keys = torch.arange(first).view(2, keys, -1)
    inner = config.linear_num_value_heads * config.linear_value_head_dim
    of_values = torch.arange(first, first + 2 * inner).view(2, keys, -1)
    order = torch.cat([part.transpose(0, 1).flatten(1) for part in (of_keys, of_values)], dim=1)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}.{NET}in_proj_"
        halves = [sources.pop(f"{prefix}{half}.weight", None) for half in ("qkv", "z")]
        there = [half for half in halves if half is not None]
        if not there:
            continue
        shapes = [half.shape for half in there]
        wanted = [(first + inner, config.hidden_size), (inner, config.hidden_size)]
        if shapes != wanted:
            raise UnsupportedModelError(
                f"it has {prefix}qkvz.weight in {len(there)} parts, "
                f"{' and '.join(map(str, map(list, shapes)))}; there have to be "
                f"{' and '.join(map(str, map(list, wanted)))}"
            )
        if f"{prefix}qkvz.weight" in sources:
            raise UnsupportedModelError(f"it has {prefix}qkvz.weight beside its parts")
        sources[f"{prefix}qkvz.weight"] = Woven(there, order.flatten())


def _hybrid(values: GgufValues) -> dict[str, Any]:
    """Layers with attention are those that the file names, or the last of each so many."""
    heads, inner = values.count(VALUE_HEADS), values.count(INNER_WIDTH)
    width, of_keys = values.count(HEAD_WIDTH), values.count(KEY_HEADS)
    values.equal(INNER_WIDTH, heads * width, "heads of values as wide as those of keys")
    if heads % of_keys:
        values.refuse(KEY_HEADS, f"only divisors of {VALUE_HEADS}, {heads}")
    num_layers = values.num_layers()
    recurrent = values.of_layers(RECURRENT)
    if recurrent is None:
        interval = values.count(INTERVAL, 4)
        recurrent = [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if len(recurrent) < num_layers:
        values.refuse(RECURRENT, f"one for each of {num_layers} layers")
    kinds = ["linear_attention" if each else "full_attention" for each in recurrent[:num_layers]]
    return {
        "layer_types": kinds,
        "linear_conv_kernel_dim": values.count(KERNEL),
        "linear_key_head_dim": width,
        "linear_value_head_dim": inner // heads,
        "linear_num_key_heads": of_keys,
        "linear_num_value_heads": heads,
        "rope_parameters": partial_rope_of(values),
    }


def _experts(values: GgufValues) -> dict[str, Any]:
    """Weights of a token's experts add up to 1."""
    width = values.count(WIDTH)
    return {
        "num_experts": values.count("expert_count"),
        "num_experts_per_tok": values.count("expert_used_count"),
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": values.count(SHARED_WIDTH, width),
    }


QWEN_35 = Architecture(
    "Qwen3_5TextConfig",
    conversions=(_norms, _value_heads, undo_mamba, one_input, as_row),
    names=NAMES,
    keys=frozenset(KEYS),
    settings=_hybrid,
    rotates_all=False,
    has_gates=True,
)
QWEN_35_MOE = replace(
    QWEN_35,
    config=None,
    experts_config="Qwen3_5MoeTextConfig",
    names=NAMES | SHARED_EXPERT,
    keys=frozenset({*KEYS, "feed_forward_length", SHARED_WIDTH}),
    expert_settings=_experts,
)
GATED_DELTA = {
    "qwen3next": replace(
        QWEN_35_MOE,
        experts_config="Qwen3NextConfig",
        conversions=(_norms, _join_inputs, undo_mamba, one_input, as_row),
    ),
    "qwen35": QWEN_35,
    "qwen35moe": QWEN_35_MOE,
}
