"""Checks: which configs and model classes the engine can run, told before any weight is read.

Each refusal is an UnsupportedModelError with the reason.
"""

from __future__ import annotations

from collections.abc import Collection, Set
from math import inf
from typing import Any

from flexinfer.errors import UnsupportedModelError

LAYER_TYPES = (
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "indexed_attention",
    "attention",
)
KV_LAYER_TYPES = (*LAYER_TYPES, "hybrid", "hybrid_sliding")
STATE_LAYER_TYPES = ("linear_attention", "conv", "hybrid", "hybrid_sliding")
"""These keep a recurrent state, by transformers' own interface where it is served (mixers.py)."""
STATELESS_LAYER_TYPES = ("moe", "mlp", "dummy")


def check_config(config: Any, model_class: Any = None) -> None:
    """Refuse what cannot work, with the reason. Reads no weights.

    model_class: of a model that is there; None: the one that transformers has for the config.
    """
    kind = f"model type {config.model_type!r}"
    try:
        text = config.get_text_config()
    except ValueError:
        raise UnsupportedModelError(
            f"{kind} is made of several text models; only decoder-only models work"
        ) from None
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{kind} is an encoder-decoder; only decoder-only models work")
    layer_types = getattr(text, "layer_types", None) or ()
    if {"linear_attention", "indexed_attention"} <= set(layer_types):
        raise UnsupportedModelError(
            f"{kind} keeps a recurrent state beside attention that chooses blocks of tokens: not "
            "supported"
        )
    for layer_type in layer_types:
        if layer_type not in (*LAYER_TYPES, *STATE_LAYER_TYPES, *STATELESS_LAYER_TYPES):
            raise UnsupportedModelError(
                f"{kind} has layers of type {layer_type!r}; "
                "only full, sliding, chunked and indexed attention keep nothing but KV"
            )
    _check_numbers(kind, text)
    if _rope_types(text) & {"dynamic"}:
        raise UnsupportedModelError(
            f"{kind} uses dynamic rope scaling, which changes the keys of cached tokens"
        )
    if getattr(text, "recurrent_kv_cache_mode", None) == "last_loop":
        raise UnsupportedModelError(
            f"{kind} has recurrent_kv_cache_mode 'last_loop', in which loops before the last see "
            "other KV than their own: not supported"
        )
    check_class(model_class or causal_class(config))


def _check_numbers(kind: str, text: Any) -> None:
    """Of those that transformers takes as they are, and a model cannot."""
    layers = getattr(text, "num_hidden_layers", 1)
    if isinstance(layers, int) and layers < 1:
        raise UnsupportedModelError(f"{kind} has num_hidden_layers = {layers}: a model needs one")
    for name in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"):
        value = getattr(text, name, None)
        if isinstance(value, int | float) and not 0 <= value < inf:
            raise UnsupportedModelError(
                f"{kind} has {name} = {value}: norms divide by the root of what it is added to"
            )


def causal_class(config: Any) -> Any:
    """transformers' causal model class for a config; UnsupportedModelError where it has none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        raise UnsupportedModelError(
            f"model type {config.model_type!r} has no causal language model in transformers"
        ) from None


def check_complete(model_class: Any, missing: Collection[str]) -> None:
    """Refuse a checkpoint without these weights of the model: transformers would draw them."""
    if missing:
        raise UnsupportedModelError(
            f"the checkpoint lacks {listed(missing)}, which a {model_class.__name__} needs"
        )


def check_shapes(mismatched: Collection[tuple[str, Any, Any]]) -> None:
    """Refuse weights of other shapes than the config says: transformers would draw them anew.

    mismatched: names, shapes in the checkpoint, shapes in the model."""
    if mismatched:
        name, there, wanted = min(mismatched)
        others = f", and {len(mismatched) - 1} more do not fit" if len(mismatched) > 1 else ""
        raise UnsupportedModelError(
            f"the checkpoint has {name} of {list(there)} where config.json asks for {list(wanted)}"
            f"{others}: one of the two is of another model"
        )


def check_plain(name: str, unexpected: Collection[str]) -> None:
    """Refuse scales beside weights where the config says nothing of quantised ones: transformers
    would take integers for weights."""
    scales = [key for key in unexpected if key.rpartition(".")[2].startswith("weight_scale")]
    if scales:
        raise UnsupportedModelError(
            f"model {name!r} has {listed(scales)}, as quantised weights have, and no "
            "quantization_config in its config.json that says in which way they are"
        )


def listed(names: Collection[str]) -> str:
    """The first three by name, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(sorted(names)[:3])}{more}"


def max_positions(config: Any) -> int | None:
    """Most tokens of a sequence; None: the architecture sets no limit."""
    text = config.get_text_config()
    limit: int | None = getattr(text, "max_position_embeddings", None)
    if "longrope" in _rope_types(text):
        # Beyond the original length, longrope rescales the keys that are cached already.
        original = getattr(text, "original_max_position_embeddings", None)
        for parameters in _rope_parameters(text):
            original = parameters.get("original_max_position_embeddings", original)
        limit = original or limit
    return limit


def check_calls_compilable(name: str, *, counts_calls: bool) -> None:
    """Refuse a model whose calls of attention torch.compile cannot tell apart."""
    if counts_calls:
        raise UnsupportedModelError(
            f"{name} calls attention several times in a layer: run it without compile"
        )


def check_compilable(config: Any) -> None:
    """Refuse what torch.compile cannot make one graph of."""
    if "indexed_attention" in (getattr(config.get_text_config(), "layer_types", None) or ()):
        raise UnsupportedModelError(
            f"model type {config.model_type!r} chooses the tokens that it sees request by request, "
            "which is no graph: run it without compile"
        )


def check_class(model_class: Any) -> None:
    """Refuse a model class that does not go through AttentionInterface or has other state."""
    import inspect

    from flexinfer.models.mixers import UPDATES

    name = model_class.__name__
    has_mixers = _has(model_class, UPDATES)
    if getattr(model_class, "_is_stateful", False) and not has_mixers:
        raise UnsupportedModelError(f"{name} is recurrent: it keeps a state that is no KV cache")
    # Hybrids do not say it of themselves: what they really do is seen in the probe.
    attends = has_mixers and _has(model_class, {"get_interface"})
    if has_mixers and not attends:
        raise UnsupportedModelError(
            f"{name} is recurrent: it keeps a state and no KV beside which it could be kept"
        )
    if not (attends or _says_it_attends(model_class)):
        raise not_attending(name)
    parameters = inspect.signature(model_class.forward).parameters
    for needed in ("position_ids", "logits_to_keep"):
        if needed not in parameters:
            raise UnsupportedModelError(f"{name}.forward has no {needed}: no flat batch possible")


def not_attending(name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name} does not use transformers' AttentionInterface, by which FlexInfer attends"
    )


def _says_it_attends(model_class: Any) -> bool:
    """Whether it goes through AttentionInterface, as it says of itself; where it says nothing, as
    its code does."""
    flag = "_supports_attention_backend"
    said = [vars(base)[flag] for base in model_class.__mro__ if flag in vars(base)]
    # The last is the default of transformers' base class.
    return bool(said[0]) if len(said) > 1 else _has(model_class, {"get_interface"})


def _has(model_class: Any, names: Set[str]) -> bool:
    """Whether the forward of a class beside the model's uses one of these names."""
    import sys

    from flexinfer.models.mixers import names_in_forward

    beside = vars(sys.modules[model_class.__module__]).values()
    return any(isinstance(member, type) and names & names_in_forward(member) for member in beside)


def chunk_of(config: Any, layer_idx: Any) -> int | None:
    """How many tokens a chunk of this layer has; None: its attention is not cut into chunks."""
    text = config.get_text_config()
    layer_types = getattr(text, "layer_types", None) or ()
    if layer_idx < len(layer_types) and layer_types[layer_idx] == "chunked_attention":
        return int(text.attention_chunk_size)
    return None


def window_limit(config: Any) -> int | None:
    """Sliding windows of masks from this length on hide nothing: no sequence is longer, or (0) no
    layer has a window. None: any window may hide something."""
    layer_types = getattr(config.get_text_config(), "layer_types", None)
    if layer_types and "sliding_attention" not in layer_types:
        return 0
    return max_positions(config)


def _rope_parameters(text_config: Any) -> list[dict[str, Any]]:
    """The rope parameters, one for each layer type where the config has several."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]


def _rope_types(text_config: Any) -> set[str]:
    return {str(parameters.get("rope_type")) for parameters in _rope_parameters(text_config)}
