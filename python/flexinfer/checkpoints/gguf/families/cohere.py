"""Command R and R7B: attention and MLP side by side, LayerNorm without biases, scaled logits.

They rotate neighbours themselves, as llama.cpp does.
"""

from __future__ import annotations

from typing import Any

from flexinfer.checkpoints.gguf.architecture import Architecture
from flexinfer.checkpoints.gguf.families.layer_norm import EPSILON, NORM_KEYS
from flexinfer.checkpoints.gguf.rope import WINDOW, WINDOW_PATTERN, windows_of
from flexinfer.checkpoints.gguf.values import GgufValues

SCALE = "logit_scale"


def _command_r(values: GgufValues) -> dict[str, Any]:
    return {
        "layer_norm_eps": values.factor(EPSILON),
        "logit_scale": values.factor(SCALE, 1.0),
        "use_qk_norm": values.has_tensor("blk.0.attn_q_norm.weight"),
    }


def _cohere2(values: GgufValues) -> dict[str, Any]:
    """Layers without a window are not rotated."""
    values.need(WINDOW)
    return {
        "layer_norm_eps": values.factor(EPSILON),
        "logit_scale": values.factor(SCALE),
        **windows_of(values, 4),
    }


COHERE = {
    "command-r": Architecture("CohereConfig", keys=NORM_KEYS | {SCALE}, settings=_command_r),
    "cohere2": Architecture(
        "Cohere2Config",
        keys=NORM_KEYS | {SCALE, WINDOW, WINDOW_PATTERN},
        settings=_cohere2,
    ),
}
