"""The probe: one forward of two tokens in which each layer's attention call is watched, so that the
KV geometry is what the model really does and not what its config seems to say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flexinfer.errors import UnsupportedModelError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from flexinfer.attention.base import AttentionOptions

HARMLESS_ARGUMENTS = frozenset(
    {
        "cache_position",
        "dropout",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Attention arguments that do not change the result here; others must be None."""


@dataclass
class LayerCall:
    """What one attention layer asked for in the probe."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    options: AttentionOptions


def probe(model: PreTrainedModel) -> list[LayerCall]:
    """Run two tokens with an attention that only looks; returns the call of each layer.

    Raises UnsupportedModelError for arguments that no backend knows, and for masks with a sliding
    window that the layers do not tell the attention of.
    """
    import torch

    from flexinfer.attention.hook import use_probe
    from flexinfer.models.checks import window_limit

    calls: dict[int, LayerCall] = {}

    def look(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
        others: dict[str, Any],
    ) -> torch.Tensor:
        layer_idx = getattr(module, "layer_idx", None)
        _check_call(type(module).__name__, module, layer_idx, calls, others)
        calls[layer_idx] = LayerCall(  # type: ignore[index]
            query.shape[0], key.shape[0], key.shape[2], value.shape[2], key.dtype, options
        )
        return query.new_zeros(query.shape[1], query.shape[0], value.shape[2])

    windows: set[int] = set()
    ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    with torch.inference_mode(), use_probe(model, look, windows):
        model(
            input_ids=ids,
            position_ids=torch.arange(2, device=model.device)[None],
            use_cache=False,
            logits_to_keep=torch.ones(1, dtype=torch.int64, device=model.device),
        )
    unknown = windows - {call.options.sliding_window for call in calls.values()}
    limit = window_limit(model.config)
    unknown = {window for window in unknown if limit is None or window < limit}
    if unknown:
        raise UnsupportedModelError(
            f"{type(model).__name__} masks a sliding window of {min(unknown)} tokens "
            "without passing it to its attention"
        )
    return [calls[layer_idx] for layer_idx in sorted(calls)]


def _check_call(
    name: str,
    module: torch.nn.Module,
    layer_idx: int | None,
    calls: dict[int, LayerCall],
    others: dict[str, Any],
) -> None:
    if layer_idx is None or layer_idx in calls:
        raise UnsupportedModelError(f"{name} does not tell its layer apart (layer_idx {layer_idx})")
    if not getattr(module, "is_causal", True) or others.pop("is_causal", None) is False:
        raise UnsupportedModelError(f"{name} attends in both directions; only causal models work")
    for argument, value in others.items():
        if value is not None and argument not in HARMLESS_ARGUMENTS:
            raise UnsupportedModelError(f"{name} passes {argument!r} to attention: not supported")
