"""LoadedModel: a model that the engine can run, and what the engine must know of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flexinfer.config import SUPPORTED_DTYPES, dtype_name
from flexinfer.errors import UnsupportedModelError
from flexinfer.models.checks import not_attending
from flexinfer.models.mixers import probe_state
from flexinfer.models.probe import LayerCall, counts_calls, no_mask, probe
from flexinfer.runtime.numbers import whole, whole_list

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from flexinfer.scheduler_config import SchedulerConfig
    from flexinfer.vtensor import StateTensor


@dataclass(frozen=True)
class AttentionLayer:
    """What one layer keeps, and how much of it its tokens see."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    """A token sees itself and the `window - 1` tokens before it; None: all."""
    chunk: int | None
    """A token sees only those of its own chunk of so many tokens."""
    owner: int
    """The layer whose K and V it reads: itself, unless it shares another's."""
    is_latent: bool = False
    """Whether its values are the first numbers of its keys, and not kept beside them."""


@dataclass(frozen=True)
class LoadedModel:
    """A model that the engine can run, and what the engine must know of it."""

    model: PreTrainedModel
    name: str
    layers: tuple[AttentionLayer, ...]
    """By layer. One that keeps a state alone, or attends to images alone, stands for the first that
    attends, whose KV nobody asks it for."""
    dtype: torch.dtype
    """Of K and V."""
    device: torch.device
    vocab_size: int
    eos_token_ids: frozenset[int]
    is_indexed: bool = False
    """Whether layers choose the tokens that they see: the last of `layers` are then the keys by
    which they do (`TokenIndex`)."""
    counts_calls: bool = False
    """Whether `layers` are in the order of attention's calls: a module calls it several times."""
    asks_cache_for_positions: bool = False
    """See `KnownPositions`."""
    state: tuple[StateTensor, ...] = ()
    """What it keeps of each sequence beside KV: its recurrent state."""


def describe(model: PreTrainedModel, name: str) -> LoadedModel:
    """Probe the model and put together what the engine must know."""
    from flexinfer.attention.token_index import token_indexes

    calls = probe(model)
    state = probe_state(model)
    counts = counts_calls(calls)
    calls = _for_each_layer(model, calls, state)
    dtypes = {call.dtype for call in calls.values()}
    if len(dtypes) > 1 or dtype_name(calls[0].dtype) not in SUPPORTED_DTYPES:
        names = ", ".join(sorted(map(dtype_name, dtypes)))
        raise UnsupportedModelError(
            f"{type(model).__name__} computes keys in {names}; "
            f"supported: one of {', '.join(SUPPORTED_DTYPES)}"
        )
    indexes = token_indexes(model)
    for layer_idx, index in enumerate(indexes, len(calls)):
        index.layer_idx = layer_idx
        if index.seen.dtype != calls[0].dtype:
            raise UnsupportedModelError(
                f"{type(model).__name__} indexes tokens in {index.seen.dtype}, and keeps keys in "
                f"{calls[0].dtype}"
            )
    return LoadedModel(
        model=model,
        name=name,
        layers=tuple(
            AttentionLayer(
                call.num_heads,
                call.num_kv_heads,
                call.key_dim,
                call.value_dim,
                call.window,
                call.chunk,
                call.owner,
                call.is_latent,
            )
            for call in calls.values()
        )
        + tuple(_index_layer(index.seen.width, index.layer_idx) for index in indexes),
        dtype=calls[0].dtype,
        state=state,
        device=model.device,
        vocab_size=model.config.get_text_config().vocab_size,
        eos_token_ids=_eos_token_ids(model, name),
        is_indexed=bool(indexes),
        counts_calls=counts,
        asks_cache_for_positions=bool(
            getattr(model.config.get_text_config(), "attn_temperature_tuning", False)
        ),
    )


def _for_each_layer(
    model: PreTrainedModel, calls: dict[int, LayerCall], state: tuple[StateTensor, ...]
) -> dict[int, LayerCall]:
    """`calls`, and for each layer without one that of the first: see `LoadedModel.layers`. Raises
    UnsupportedModelError where such a layer keeps something that is not known."""
    text = model.config.get_text_config()
    num_layers = text.num_hidden_layers
    # Mllama's that attend to an image alone are passed over where there is none.
    passed_over = set(getattr(text, "cross_attention_layers", None) or ())
    called = {call.layer_idx for call in calls.values()}  # Dory's several times, some of them
    is_regular = list(calls) == list(range(len(calls))) and len(calls) % num_layers == 0
    is_regular |= passed_over | called == set(range(num_layers))
    if not calls:
        raise not_attending(type(model).__name__)
    if not (is_regular or state):
        raise UnsupportedModelError(
            f"{type(model).__name__} has {num_layers} layers, of which {len(calls)} use attention"
        )
    if state:
        _check_beside_state(model, calls)
    if not (state or passed_over):
        return calls
    last = max(*calls, *(tensor.layer for tensor in state))
    return {i: calls[i if i in calls else min(calls)] for i in range(last + 1)}


def _check_beside_state(model: PreTrainedModel, calls: dict[int, LayerCall]) -> None:
    """Refuse what attends beside a state in a way that the engine does not know."""
    from flexinfer.attention.token_index import token_indexes
    from flexinfer.models.checks import KV_LAYER_TYPES

    name = type(model).__name__
    if counts_calls(calls) or token_indexes(model):
        raise UnsupportedModelError(
            f"{name} keeps a recurrent state beside attention that chooses tokens, or whose layers "
            "do not tell themselves apart: not supported"
        )
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    attending = {idx for idx, kind in enumerate(layer_types) if kind in KV_LAYER_TYPES}
    if attending - set(calls):
        raise UnsupportedModelError(
            f"{name} does not attend in layer {min(attending - set(calls))} by transformers' "
            "AttentionInterface"
        )


def _index_layer(width: int, layer_idx: int) -> AttentionLayer:
    """Keys of an index: kept as a layer's are, without values."""
    return AttentionLayer(1, 1, width, width, None, None, layer_idx, is_latent=True)


def _eos_token_ids(model: PreTrainedModel, name: str) -> frozenset[int]:
    for source in (model.generation_config, model.config.get_text_config()):
        given = getattr(source, "eos_token_id", None)
        if given is None:
            continue
        try:
            if isinstance(given, (list, tuple)):
                return frozenset(whole_list("eos_token_id", given))
            return frozenset([whole("eos_token_id", given)])
        except ValueError as error:
            raise UnsupportedModelError(
                f"model {name!r}: {error}; look into its generation_config.json and config.json"
            ) from None
    return frozenset()


def warm_up(loaded: LoadedModel, limits: SchedulerConfig, max_seq_len: int) -> None:
    """Run the largest step that there may be, without attention, on a GPU.

    Afterwards torch holds the memory that activations and logits need, and the libraries theirs:
    what is then free is free for KV (as vLLM's profiling run finds out).
    """
    import torch

    num_tokens, num_rows = limits.max_num_batched_tokens, limits.max_num_seqs
    positions = torch.arange(num_tokens, device=loaded.device) % max_seq_len
    with torch.inference_mode():
        logits = run_blind(loaded, positions, num_rows)
        torch.softmax(logits.float(), dim=-1).sort(dim=-1)  # the sampler's largest temporaries


def run_blind(loaded: LoadedModel, positions: torch.Tensor, num_logits: int) -> torch.Tensor:
    """A forward of as many tokens as there are positions, in which nothing is attended to. Returns
    the logits of the first rows [num_logits, vocab_size]."""
    import torch

    from flexinfer.attention.hook import use_probe

    def look(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        *others: Any,
    ) -> torch.Tensor:  # fmt: skip
        return query.new_zeros(query.shape[1], query.shape[0], value.shape[2])

    with use_probe(loaded.model, look, set()):
        logits: torch.Tensor = loaded.model(
            input_ids=torch.zeros_like(positions)[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=torch.arange(num_logits, device=loaded.device),
            **no_mask(loaded.is_indexed, loaded.device),
        ).logits
    return logits[0]
