"""gpt-oss: experts with biases, sinks, every second layer with a window."""

from __future__ import annotations

from typing import Any

import torch

from flexinfer.checkpoints.gguf.architecture import Architecture
from flexinfer.checkpoints.gguf.rope import WINDOW, WINDOW_PATTERN, rope_of, windows_of
from flexinfer.checkpoints.gguf.sources import FLOATS, Changed, Source
from flexinfer.checkpoints.gguf.values import GgufValues
from flexinfer.errors import UnsupportedModelError

HALVES = ("mlp.experts.gate_proj_bias", "mlp.experts.up_proj_bias")
WHOLE = "mlp.experts.gate_up_proj_bias"
NAMES = {
    "attn_sinks.weight": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps.bias": HALVES[0],
    "ffn_up_exps.bias": HALVES[1],
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}


def _join_biases(sources: dict[str, Source], config: Any) -> None:
    """Of gates and factors, [experts, 2 * hidden] in the model: a number of the first, one of the
    second, and so on."""
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        halves = [sources.pop(prefix + half) for half in HALVES if prefix + half in sources]
        if not halves:
            continue
        shapes = {half.shape for half in halves}
        shape = halves[0].shape
        if len(halves) < 2 or len(shapes) > 1 or len(shape) != 2:
            raise UnsupportedModelError(
                f"it has {prefix}{WHOLE} in {len(halves)} halves "
                f"{' and '.join(map(str, map(list, shapes)))}; there have to be two of one shape, "
                "a row for each expert"
            )
        if other := {half.type for half in halves} - FLOATS.keys():
            raise UnsupportedModelError(
                f"it has {prefix}{WHOLE} as {other.pop()}; known are {', '.join(FLOATS)}"
            )
        whole = (shape[0], 2 * shape[1])
        sources[prefix + WHOLE] = Changed(_in_turns, *halves, shape=whole)


def _in_turns(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.stack([first, second.to(first.dtype)], dim=-1).flatten(1)


def _settings(values: GgufValues) -> dict[str, Any]:
    """The converter leaves out that rotations are not cut off at whole numbers, as published models
    of this kind say; llama.cpp cuts them off."""
    values.need(WINDOW)
    rope = rope_of(values)
    uncut = {"truncate": False} if rope["rope_type"] == "yarn" else {}
    return {**windows_of(values, 2), "rope_parameters": rope | uncut}


GPT_OSS = {
    "gpt-oss": Architecture(
        None,
        experts_config="GptOssConfig",
        conversions=(_join_biases,),
        names=NAMES,
        keys=frozenset({WINDOW, WINDOW_PATTERN}),
        settings=_settings,
    )
}
