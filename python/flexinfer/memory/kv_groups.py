"""KV groups of a model: which layers keep KV in which shape, and how much of it. No torch."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Any

from flexinfer.config import dtype_name

if TYPE_CHECKING:
    from flexinfer.config import EngineConfig
    from flexinfer.models.describe import LoadedModel
    from flexinfer.vtensor.spec import KVSpec

CUDA_WINDOW_SLACK = 256
"""Tokens before a window that a kernel may touch: it loads whole tiles and masks what they have too
much, and on CUDA an address without memory faults."""


def check_kv_dtype(config: EngineConfig, model_config: Any) -> None:
    """Refuse to quantise KV where it cannot be read, before any weight is. Raises ValueError."""
    if config.kv_cache_dtype == "auto":
        return
    wanted = f"kv_cache_dtype {config.kv_cache_dtype!r}"
    device = config.device or getattr(config.model, "device", "cpu")
    if str(device) != "cpu":
        raise ValueError(f"{wanted} is for the CPU alone: no kernel here reads it on {device}")
    if _has_latents(model_config.get_text_config()):
        raise ValueError(
            f"{wanted} is not for model type {model_config.model_type!r}: it keeps latents (MLA), "
            "whose values are a part of their keys and would need a scale of their own"
        )


def _has_latents(config: Any) -> bool:
    """A config whose layers differ raises for what they differ in (dots3.note's)."""
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    return any(getattr(layer, "kv_lora_rank", None) for layer in layers)


def kv_spec(
    loaded: LoadedModel,
    max_seq_len: int,
    layers_per_plane: int | None,
    kv_cache_dtype: str = "auto",
) -> KVSpec:
    """The shape of the model's KV: layers of one shape and window are a group, and those that keep
    a recurrent state."""
    from flexinfer.runtime.kernels import SCALE_BYTES
    from flexinfer.vtensor import KVGroup, KVSpec, StateGroup, StateLayout

    dtype, scale_bytes = dtype_name(loaded.dtype), 0
    if kv_cache_dtype != "auto":
        if loaded.is_indexed or any(layer.is_latent for layer in loaded.layers):
            raise ValueError(
                f"kv_cache_dtype {kv_cache_dtype!r} is not for {loaded.name}: its latents or the "
                "keys that an index selects are read as they are"
            )
        dtype, scale_bytes = "uint8", SCALE_BYTES
    layers: dict[tuple[int, int, int, int | None], list[int]] = {}
    windows = _windows(loaded, max_seq_len)
    if loaded.state and None not in windows.values():
        windows = dict.fromkeys(windows)  # a state lies where KV is kept for all tokens
    for owner, window in windows.items():
        shape = loaded.layers[owner]
        value_dim = 0 if shape.is_latent else shape.value_dim + scale_bytes
        key = (shape.num_kv_heads, shape.key_dim + scale_bytes, value_dim, window)
        layers.setdefault(key, []).append(owner)
    groups = [
        KVGroup(
            tuple(owners),
            heads,
            key_dim,
            value_dim,
            dtype,
            window=window,
            layers_per_plane=layers_per_plane and gcd(layers_per_plane, len(owners)),
        )
        for (heads, key_dim, value_dim, window), owners in layers.items()
    ]
    if loaded.state:
        least_len = StateLayout.of(groups, loaded.state).num_tokens + 1
        states = StateGroup(loaded.state)
        return KVSpec.of_groups([*groups, states], max(max_seq_len, least_len))
    first = groups[0]
    is_uniform = len(groups) == 1 and first.window is None and first.key_dim == first.value_dim
    if is_uniform and first.layers == tuple(range(len(first.layers))):
        return KVSpec(
            len(first.layers),
            first.num_kv_heads,
            first.key_dim,
            first.dtype,
            max_seq_len,
            layers_per_plane,
        )
    return KVSpec.of_groups(groups, max_seq_len)


def _windows(loaded: LoadedModel, max_seq_len: int) -> dict[int, int | None]:
    """By layer that owns KV: how many tokens its readers see; None: all that there may be."""
    slack = CUDA_WINDOW_SLACK if loaded.device.type == "cuda" else 0
    seen: dict[int, int] = {}
    for layer in loaded.layers:
        reach = min(layer.window or max_seq_len, layer.chunk or max_seq_len)
        seen[layer.owner] = max(seen.get(layer.owner, 0), reach + slack)
    return {owner: None if w >= max_seq_len else w for owner, w in sorted(seen.items())}
