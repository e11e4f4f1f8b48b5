"""Models: loading through transformers, and deciding whether the engine can run one.

Two gates, each with a clear refusal (`UnsupportedModelError`):
1. `check_config` before any weight is read: architecture, layer types, position encoding;
2. `probe` after loading: one forward of two tokens in which each layer's attention call is watched,
   so that the KV geometry is what the model really does and not what its config seems to say.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flexinfer.config import SUPPORTED_DTYPES, dtype_name
from flexinfer.errors import UnsupportedModelError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from flexinfer.attention.base import AttentionOptions
    from flexinfer.config import SchedulerConfig

logger = logging.getLogger(__name__)

LAYER_TYPES = ("full_attention", "sliding_attention", "attention")
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


@dataclass(frozen=True)
class LoadedModel:
    """A model that the engine can run, and what the engine must know of it."""

    model: PreTrainedModel
    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    """Of K and V."""
    device: torch.device
    vocab_size: int
    eos_token_ids: frozenset[int]


def load_model(model: Any, dtype: Any = "auto", device: str | None = None) -> LoadedModel:
    """Load (a path or hub id) or take over (a loaded model) and check.

    Layers of a model that is loaded here are replaced by lean ones where there are any; one that is
    taken over stays as it is.

    Raises UnsupportedModelError, before any weight is read where the config tells enough.
    """
    from flexinfer.runtime.torch_settings import large_blocks_apart, return_freed_memory

    config = resolve_config(model)
    with large_blocks_apart():
        loaded, name = _place(model, config, dtype, device)
    return_freed_memory()
    return _describe(loaded, name)


def _place(model: Any, config: Any, dtype: Any, device: str | None) -> tuple[PreTrainedModel, str]:
    """The model on its device, lean where it is loaded here, and its name."""
    from flexinfer.layers.fuse import make_lean
    from flexinfer.runtime.weight_files import let_go_of_files

    if isinstance(model, (str, os.PathLike)):
        name = os.fspath(model)
        loaded = _load_weights(name, config, dtype, device or "cpu")
    else:
        loaded = model
        name = str(getattr(config, "name_or_path", "")) or type(loaded).__name__
    _check_class(type(loaded))
    module: torch.nn.Module = loaded
    if device is not None:
        module.to(device)
    module.eval()
    if loaded is not model:
        make_lean(loaded)
        let_go_of_files(loaded)
    return loaded, name


def resolve_config(model: Any) -> Any:
    """The config of a path, a hub id or a loaded model, checked. Reads no weights."""
    if isinstance(model, (str, os.PathLike)):
        config = load_config(os.fspath(model))
    else:
        config = _require_model(model).config
    check_config(config)
    return config


def load_config(name: str) -> Any:
    """The config of a local folder or hub id; a clear error if there is none."""
    from transformers import AutoConfig

    looks_local = os.path.isabs(name) or name.startswith((".", "~")) or name.count("/") > 1
    if looks_local and not os.path.isdir(name):
        raise UnsupportedModelError(f"model folder {name!r} does not exist")
    if os.path.isdir(name) and not os.path.isfile(os.path.join(name, "config.json")):
        raise UnsupportedModelError(f"model folder {name!r} has no config.json")
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(
            f"model {name!r} can not be loaded: {_first_line(error)}"
        ) from error


def check_config(config: Any) -> None:
    """Refuse what can not work, with the reason. Reads no weights."""
    text = config.get_text_config()
    kind = f"model type {config.model_type!r}"
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{kind} is an encoder-decoder; only decoder-only models work")
    for layer_type in getattr(text, "layer_types", None) or ():
        if layer_type not in LAYER_TYPES:
            raise UnsupportedModelError(
                f"{kind} has layers of type {layer_type!r}; "
                "only full_attention and sliding_attention keep a KV cache that can be shared"
            )
    if getattr(text, "num_kv_shared_layers", 0):
        raise UnsupportedModelError(f"{kind} shares KV between layers, which is not supported")
    if getattr(text, "kv_lora_rank", None) and _qk_head_dim(text) != text.v_head_dim:
        raise UnsupportedModelError(
            f"{kind} uses multi-head latent attention: keys of width {_qk_head_dim(text)} and "
            f"values of width {text.v_head_dim} do not fit one KV arena"
        )
    if _rope_types(text) & {"dynamic"}:
        raise UnsupportedModelError(
            f"{kind} uses dynamic rope scaling, which changes the keys of cached tokens"
        )
    check_architecture(config)


def check_architecture(config: Any) -> None:
    """Refuse a config whose causal model class does not exist or can not take our attention."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        raise UnsupportedModelError(
            f"model type {config.model_type!r} has no causal language model in transformers"
        ) from None
    _check_class(model_class)


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


@dataclass
class _LayerCall:
    """What one attention layer asked for in the probe."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    options: AttentionOptions


def probe(model: PreTrainedModel) -> list[_LayerCall]:
    """Run two tokens with an attention that only looks; returns the call of each layer.

    Raises UnsupportedModelError for arguments that no backend knows, and for masks with a sliding
    window that the layers do not tell the attention of.
    """
    import torch

    from flexinfer.attention.hook import use_probe

    calls: dict[int, _LayerCall] = {}

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
        calls[layer_idx] = _LayerCall(  # type: ignore[index]
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
    if unknown:
        raise UnsupportedModelError(
            f"{type(model).__name__} masks a sliding window of {min(unknown)} tokens "
            "without passing it to its attention"
        )
    return [calls[layer_idx] for layer_idx in sorted(calls)]


def warm_up(loaded: LoadedModel, limits: SchedulerConfig, max_seq_len: int) -> None:
    """Run the largest step that there may be, without attention, on a GPU.

    Afterwards torch holds the memory that activations and logits need, and the libraries theirs:
    what is then free is free for KV (as vLLM's profiling run finds out).
    """
    import torch

    from flexinfer.attention.hook import use_probe

    def look(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        *others: Any,
    ) -> torch.Tensor:  # fmt: skip
        return query.new_zeros(query.shape[1], query.shape[0], value.shape[2])

    num_tokens, num_rows = limits.max_num_batched_tokens, limits.max_num_seqs
    positions = torch.arange(num_tokens, device=loaded.device) % max_seq_len
    with torch.inference_mode(), use_probe(loaded.model, look, set()):
        logits = loaded.model(
            input_ids=torch.zeros_like(positions)[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=torch.arange(num_rows, device=loaded.device),
        ).logits
        torch.softmax(logits[0].float(), dim=-1).sort(dim=-1)  # the sampler's largest temporaries


def _check_call(
    name: str,
    module: torch.nn.Module,
    layer_idx: int | None,
    calls: dict[int, _LayerCall],
    others: dict[str, Any],
) -> None:
    if layer_idx is None or layer_idx in calls:
        raise UnsupportedModelError(f"{name} does not tell its layer apart (layer_idx {layer_idx})")
    if not getattr(module, "is_causal", True) or others.pop("is_causal", None) is False:
        raise UnsupportedModelError(f"{name} attends in both directions; only causal models work")
    for argument, value in others.items():
        if value is not None and argument not in HARMLESS_ARGUMENTS:
            raise UnsupportedModelError(f"{name} passes {argument!r} to attention: not supported")


def _describe(model: PreTrainedModel, name: str) -> LoadedModel:
    """Probe the model and put together what the engine must know."""
    calls = probe(model)
    num_layers = model.config.get_text_config().num_hidden_layers
    if len(calls) != num_layers:
        raise UnsupportedModelError(
            f"{type(model).__name__} has {num_layers} layers, of which {len(calls)} use attention"
        )
    shapes = {(c.num_heads, c.num_kv_heads, c.key_dim, c.value_dim, c.dtype) for c in calls}
    if len(shapes) != 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} has layers of different KV shapes "
            f"(heads, KV heads, key width, value width, dtype): {sorted(map(str, shapes))}"
        )
    call = calls[0]
    if call.key_dim != call.value_dim:
        raise UnsupportedModelError(
            f"{type(model).__name__} has keys of width {call.key_dim} but values of width "
            f"{call.value_dim}; one width is needed"
        )
    if dtype_name(call.dtype) not in SUPPORTED_DTYPES:
        raise UnsupportedModelError(
            f"{type(model).__name__} computes keys in {dtype_name(call.dtype)}; "
            f"supported: {', '.join(SUPPORTED_DTYPES)}"
        )
    return LoadedModel(
        model=model,
        name=name,
        num_layers=num_layers,
        num_heads=call.num_heads,
        num_kv_heads=call.num_kv_heads,
        head_dim=call.key_dim,
        dtype=call.dtype,
        device=model.device,
        vocab_size=model.config.get_text_config().vocab_size,
        eos_token_ids=_eos_token_ids(model),
    )


def _load_weights(name: str, config: Any, dtype: Any, device: str) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    from flexinfer.runtime.weight_files import converting_one_by_one

    try:
        with converting_one_by_one():
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                name,
                config=config,
                dtype=_weights_dtype(config, dtype, device),
                use_safetensors=True,
                trust_remote_code=False,
            )
    except OSError as error:
        raise UnsupportedModelError(
            f"model {name!r} has no safetensors weights that can be read: {_first_line(error)}"
        ) from error
    return model


def _weights_dtype(config: Any, dtype: Any, device: str) -> Any:
    """The torch dtype to load in. "auto" is the config's, except float16, which is slow on CPUs."""
    import torch

    if dtype == "auto":
        dtype = getattr(config.get_text_config(), "dtype", None) or config.dtype or torch.float32
        if dtype_name(dtype) == "float16" and device.startswith("cpu"):
            logger.info("float16 is slow on CPUs: loading in bfloat16")
            dtype = torch.bfloat16
    return getattr(torch, dtype_name(dtype))


def _require_model(model: Any) -> PreTrainedModel:
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"model must be a path, a hub id or a transformers model, got {type(model).__name__}"
        )
    return model


def _check_class(model_class: Any) -> None:
    """Refuse a model class that does not go through AttentionInterface or has other state."""
    import inspect

    name = model_class.__name__
    if getattr(model_class, "_is_stateful", False):
        raise UnsupportedModelError(f"{name} is recurrent: it keeps a state that is no KV cache")
    if not getattr(model_class, "_supports_attention_backend", False):
        raise UnsupportedModelError(
            f"{name} does not use transformers' AttentionInterface, by which FlexInfer attends"
        )
    parameters = inspect.signature(model_class.forward).parameters
    for needed in ("position_ids", "logits_to_keep"):
        if needed not in parameters:
            raise UnsupportedModelError(f"{name}.forward has no {needed}: no flat batch possible")


def _eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    for source in (model.generation_config, model.config.get_text_config()):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()


def _rope_parameters(text_config: Any) -> list[dict[str, Any]]:
    """The rope parameters, one for each layer type where the config has several."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]


def _rope_types(text_config: Any) -> set[str]:
    return {str(parameters.get("rope_type")) for parameters in _rope_parameters(text_config)}


def _qk_head_dim(text_config: Any) -> int:
    return int(text_config.qk_nope_head_dim + text_config.qk_rope_head_dim)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
