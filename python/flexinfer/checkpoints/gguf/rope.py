"""What the config says of rotations and windows, of the keys of a GGUF file."""

from __future__ import annotations

from math import nextafter
from typing import Any

from flexinfer.checkpoints.gguf.values import GgufValues

WINDOW, WINDOW_PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
WINDOW_BASE = "rope.freq_base_swa"
ORIGINAL = "rope.scaling.original_context_length"
BETAS = {"rope.scaling.yarn_beta_fast": "beta_fast", "rope.scaling.yarn_beta_slow": "beta_slow"}
"""Keys of rotations that yarn leaves as they are, and of those that it stretches wholly -> names of
the config."""
YARN_SCORE_FACTOR, SCORE_FACTOR = "rope.scaling.yarn_attn_factor", "rope.scaling.attn_factor"
"""By what scores are multiplied, where the config says so; the second is that of older files."""
MSCALE = "rope.scaling.yarn_log_multiplier"
"""By what yarn multiplies the logarithm of its factor for scores."""
ROTATED = "rope.dimension_count"
"""How many numbers of a head are rotated, the first ones."""
SECTIONS = "rope.dimension_sections"
"""How many of the rotations are by the time, the row and the column of a part of an image. Text has
one position for all three, and is rotated as elsewhere."""


def rope_of(values: GgufValues) -> dict[str, Any]:
    """The config's rope_parameters."""
    parameters = {"rope_type": "default", "rope_theta": values.factor("rope.freq_base", 1e4)}
    # A factor alone is of linear scaling, and one of 0 of none, as llama.cpp reads it.
    unsaid = "linear" if values.get("rope.scaling.factor") else "none"
    kind = values.get("rope.scaling.type", unsaid)
    if kind != "yarn" and values.get(YARN_SCORE_FACTOR, 1.0) != 1.0:
        values.refuse(YARN_SCORE_FACTOR, "1, where rotations are not scaled by yarn")
    if kind == "linear":
        return parameters | {"rope_type": kind, "factor": values.factor("rope.scaling.factor")}
    if kind == "yarn":
        known = {YARN_SCORE_FACTOR: "attention_factor", SCORE_FACTOR: "attention_factor", **BETAS}
        own = {name: key for key, name in known.items() if values.get(key) is not None}
        return parameters | {
            "rope_type": kind,
            "factor": values.factor("rope.scaling.factor"),
            "original_max_position_embeddings": values.count(ORIGINAL),
            **{name: values.factor(key) for name, key in own.items()},
        }
    if kind != "none":
        values.refuse("rope.scaling.type", "none, linear and yarn")
    return parameters


def partial_rope_of(values: GgufValues) -> dict[str, Any]:
    """As `rope_of`, where some numbers of a head may not be rotated."""
    width = values.count("embedding_length") // values.count("attention.head_count")
    width = values.count("attention.key_length", width)
    rotated = values.count(ROTATED, width)
    if rotated > width or rotated % 2:
        values.refuse(ROTATED, f"even numbers up to the width of keys, {width}")
    share = rotated / width
    if int(share * width) < rotated:  # which is how transformers gets it back: 30 of 52 were 29
        share = nextafter(share, 1.0)
    return rope_of(values) | {"partial_rotary_factor": share}


def windows_of(values: GgufValues, pattern: int) -> dict[str, Any]:
    """Of so many layers the last one has no window, where the file does not say it of each, or of
    those beside that predict tokens beyond the next."""
    layers, windows = range(values.num_layers()), values.of_layers(WINDOW_PATTERN)
    if windows is not None and len(windows) == values.count("block_count"):
        windows = windows[: len(layers)]
    if windows is None:
        pattern = values.count(WINDOW_PATTERN, pattern)
        windows = [(layer + 1) % pattern != 0 for layer in layers]
    if len(windows) != len(layers):
        values.refuse(WINDOW_PATTERN, f"a number, or one for each of {len(layers)} layers")
    kinds = ["sliding_attention" if has_window else "full_attention" for has_window in windows]
    return {"sliding_window": values.count(WINDOW, 4096), "layer_types": kinds}


def rope_of_kinds(values: GgufValues, base: float | None = None) -> dict[str, Any]:
    """As `rope_of`, where layers with a window rotate by a base of their own, and are not
    stretched. base: theirs where the file does not say it; None: that of the others."""
    rope = rope_of(values)
    base = values.factor(WINDOW_BASE, rope["rope_theta"] if base is None else base)
    return {
        "full_attention": rope,
        "sliding_attention": {"rope_type": "default", "rope_theta": base},
    }
