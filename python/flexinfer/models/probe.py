"""The probe: one forward of two tokens in which each layer's attention call is watched, so that the
KV geometry is what the model really does and not what its config seems to say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flexinfer.errors import UnsupportedModelError
from flexinfer.models.arguments import HARMLESS_ARGUMENTS

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from flexinfer.attention.base import AttentionOptions


@dataclass
class LayerCall:
    """What one attention layer asked for in the probe."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    options: AttentionOptions
    window: int | None
    """A token sees itself and the `window - 1` tokens before it."""
    layer_idx: Any
    """By which its module calls itself; some call attention several times in a forward."""
    chunk: int | None
    """A token sees only those of its own chunk of so many tokens; the mask alone says so."""
    owner: int
    """The first layer with the same K and V: this one, unless it shares another's."""
    is_latent: bool
    """Whether its values are the first numbers of its keys."""


def probe(model: PreTrainedModel) -> dict[int, LayerCall]:
    """Run two tokens with an attention that only looks; returns KV layer -> call, in order.

    KV layers are what the modules call themselves; where two calls have one name, they are counted
    (`counts_calls`). Raises UnsupportedModelError for arguments that no backend knows, and for
    masks with a sliding window that layers do not tell the attention of, unless all have the same.
    """
    import torch

    from flexinfer.attention.hook import use_probe
    from flexinfer.attention.token_index import token_indexes
    from flexinfer.models.checks import chunk_of

    calls: dict[int, LayerCall] = {}
    owners = KVOwners()

    def look(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
        others: dict[str, Any],
    ) -> torch.Tensor:
        layer_idx = getattr(module, "layer_idx", None)
        if is_indexed:
            others.pop("indices", None)
            others.pop("attention_mask", None)  # NO_MASK
        _check_call(type(module).__name__, module, layer_idx, others)
        calls[len(calls)] = LayerCall(
            query.shape[0],
            key.shape[0],
            key.shape[2],
            value.shape[2],
            key.dtype,
            options,
            options.sliding_window,
            layer_idx,
            chunk_of(model.config, layer_idx),
            owners.of(len(calls), key, value),
            same_memory(value, key[..., : value.shape[2]]),
        )
        return query.new_zeros(query.shape[1], query.shape[0], value.shape[2])

    windows: set[int | None] = set()
    is_indexed = bool(token_indexes(model))
    ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    with torch.inference_mode(), use_probe(model, look, windows):
        model(
            input_ids=ids,
            position_ids=torch.arange(2, device=model.device)[None],
            use_cache=False,
            logits_to_keep=torch.ones(1, dtype=torch.int64, device=model.device),
            **no_mask(is_indexed, model.device),
        )
    _settle_windows(model, windows, calls)
    return _by_layer(calls)


def _by_layer(calls: dict[int, LayerCall]) -> dict[int, LayerCall]:
    """Calls in their order, as KV layers: by what their modules call themselves, if that tells."""
    names = [call.layer_idx for call in calls.values()]
    if counts_calls(calls):
        return calls
    for call in calls.values():
        call.owner = names[call.owner]
    return {name: calls[number] for number, name in sorted(enumerate(names), key=lambda n: n[1])}


def _settle_windows(
    model: PreTrainedModel, masked: set[int | None], calls: dict[int, LayerCall]
) -> None:
    """masked: the windows of the masks that the model has asked for; one that all layers have, and
    do not tell, becomes theirs."""
    from flexinfer.models.checks import window_limit

    unknown = masked - {None} - {call.window for call in calls.values()}
    unknown -= {call.chunk for call in calls.values()}
    limit = window_limit(model.config)
    hiding = [window for window in unknown if window and (limit is None or window < limit)]
    if not hiding:
        return
    if len(masked) > 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} masks a sliding window of {min(hiding)} tokens "
            "without passing it to its attention"
        )
    for call in calls.values():
        call.window = hiding[0]


def counts_calls(calls: dict[int, LayerCall]) -> bool:
    """Whether attention is called several times by one name in a forward."""
    return len({call.layer_idx for call in calls.values()}) < len(calls)


def no_mask(is_indexed: bool, device: torch.device) -> dict[str, torch.Tensor]:
    """Arguments of a model's forward: one with an index of tokens wants a mask, and passes it on to
    those who make their own."""
    import torch

    return {"attention_mask": torch.zeros(1, 1, 1, 1, device=device)} if is_indexed else {}


class KVOwners:
    """Which layer made the K and V that a layer attends to: some take another's (Gemma 3n)."""

    def __init__(self) -> None:
        # Held, so that no other tensor comes to lie at the same address.
        self._seen: list[tuple[Any, torch.Tensor, torch.Tensor]] = []

    def of(self, layer_idx: Any, key: torch.Tensor, value: torch.Tensor) -> Any:
        """The first layer that showed these very tensors; `layer_idx` if it is this one."""
        for owner, its_key, its_value in self._seen:
            if same_memory(its_key, key) and same_memory(its_value, value):
                return owner
        self._seen.append((layer_idx, key, value))
        return layer_idx


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether both are the same view of the same numbers."""
    return (a.data_ptr(), a.shape, a.stride(), a.dtype) == (
        b.data_ptr(), b.shape, b.stride(), b.dtype,
    )  # fmt: skip


def _check_call(
    name: str,
    module: torch.nn.Module,
    layer_idx: int | None,
    others: dict[str, Any],
) -> None:
    if layer_idx is None:
        raise UnsupportedModelError(f"{name} does not tell its layer (layer_idx is None)")
    if not getattr(module, "is_causal", True) or others.pop("is_causal", None) is False:
        raise UnsupportedModelError(f"{name} attends in both directions; only causal models work")
    for argument, value in others.items():
        if value is not None and argument not in HARMLESS_ARGUMENTS:
            raise UnsupportedModelError(f"{name} passes {argument!r} to attention: not supported")
