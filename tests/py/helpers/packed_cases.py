"""Settings of GPTQ, AWQ and compressed-tensors, and what tiny folders of each are written with."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from helpers.packed_folders import awq, compressed, draw_numbers, gptq
from helpers.tiny_models import CONFIGS, draw_model

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
BYTES = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
INPUTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def compressed_settings(
    weights: dict[str, Any],
    inputs: dict[str, Any] | None = None,
    kind: str = "pack-quantized",
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
    }


def fixed(group: int, bits: int = 4, is_symmetric: bool = False) -> Any:
    def draw(outputs: int, inputs: int, seed: int) -> Any:
        return draw_numbers(outputs, inputs, group or inputs, bits, is_symmetric, seed)

    return draw


CASES: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "gptq": (GPTQ, fixed(32), partial(gptq, bits=4)),
    "gptq symmetric": ({**GPTQ, "sym": True}, fixed(32, 4, True), partial(gptq, bits=4)),
    "gptq v2": (
        {**GPTQ, "checkpoint_format": "gptq_v2"},
        fixed(32),
        partial(gptq, bits=4, less=0),
    ),
    "gptq 8 bits": ({**GPTQ, "bits": 8}, fixed(32, 8), partial(gptq, bits=8)),
    "gptq by output": ({**GPTQ, "group_size": -1}, fixed(0), partial(gptq, bits=4)),
    "awq": (AWQ, fixed(32), awq),
    "compressed": (
        compressed_settings(WEIGHTS),
        fixed(32, 4, True),
        partial(compressed, bits=4, is_symmetric=True),
    ),
    "compressed asymmetric": (
        compressed_settings({**WEIGHTS, "symmetric": False}),
        fixed(32),
        partial(compressed, bits=4, is_symmetric=False),
    ),
    "compressed by output": (
        compressed_settings({**WEIGHTS, "strategy": "channel", "group_size": None}),
        fixed(0, 4, True),
        partial(compressed, bits=4, is_symmetric=True),
    ),
    "compressed 8 bits": (
        compressed_settings({**WEIGHTS, "num_bits": 8}),
        fixed(32, 8, True),
        partial(compressed, bits=8, is_symmetric=True),
    ),
}
W4, W8 = compressed_settings(WEIGHTS), compressed_settings(BYTES, INPUTS, "int-quantized")
OWN = "config_groups/group_0"


def tiny() -> Any:
    return draw_model(CONFIGS["llama"]())


def changed(settings: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    settings = copy.deepcopy(settings)
    *outer, last = path.split("/")
    inner = settings
    for name in outer:
        inner = inner[name]
    inner[last] = value
    return settings
