"""Mixers: the modules of a model that carry a recurrent state from token to token, and running them
on a flat batch.

A mixer (Mamba, gated delta rule, short convolution) is transformers' own code: it takes [batch,
tokens, width] and a cache, reads the state before the tokens there and leaves the one behind them.
All sequences of a call have equally many tokens. So in a step of a flat batch each mixer is called
for the parts of the batch one after the other: the decodes together, each prefill alone.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch

from flexinfer.config import dtype_name
from flexinfer.errors import UnsupportedModelError
from flexinfer.models.arguments import HARMLESS_ARGUMENTS
from flexinfer.runtime.cache_argument import CACHE_ARGUMENTS, cache_argument
from flexinfer.vtensor import StateTensor

LINEAR_CACHE = "set_linear_cache"
"""What the forward of MiniMax's lightning attention calls of its own kind of cache."""
UPDATES = frozenset({"update_conv_state", "update_recurrent_state", LINEAR_CACHE})
"""What a mixer's forward calls of its cache."""
_MAX_STATES = 4
"""Of one kind in one layer."""

Forward = Callable[..., torch.Tensor]
RunMixer = Callable[["Mixer", Forward, torch.Tensor, dict[str, Any]], torch.Tensor]
"""(mixer, its own forward, hidden states [1, num_tokens, width], other arguments) -> the same
shape."""


@dataclass(frozen=True)
class Mixer:
    """One module with a state."""

    module: torch.nn.Module
    layer_idx: int
    cache_argument: str
    goes_on: bool
    """Whether several tokens may follow a state. In transformers the scans of Mamba's first version
    begin without one, and would pass over it in silence: what follows goes token by token."""
    is_attention: bool
    """Whether it is called as an attention is: with a mask and position embeddings, of which it
    makes no use here, and for a tuple."""

    def call(self, forward: Callable[..., Any], hidden_states: torch.Tensor, cache: Any) -> Any:
        """Its output for hidden states [batch, tokens, width], by its own forward."""
        if not self.is_attention:
            return forward(hidden_states, **{self.cache_argument: cache})
        unused = {"position_embeddings": None, "attention_mask": None}
        return forward(hidden_states, **unused, **{self.cache_argument: cache})[0]


def find_mixers(model: torch.nn.Module) -> list[Mixer]:
    """In the model's order. Raises UnsupportedModelError for one that cannot be called by parts."""
    mixers: list[Mixer] = []
    inside: set[torch.nn.Module] = set()
    for module in model.modules():
        updates = UPDATES & names_in_forward(type(module))
        if not updates:
            continue
        name = type(module).__name__
        parameters = inspect.signature(inspect.unwrap(type(module).forward)).parameters
        others = list(parameters.values())[2:]  # without self and hidden states
        argument = cache_argument(type(module).forward)
        layer_idx = getattr(module, "layer_idx", None)
        # What a mixer is called with beside hidden states is named, or a part of an attention.
        is_attention = LINEAR_CACHE in updates
        is_part = not is_attention and any(
            p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD for p in others
        )
        if module in inside or argument is None or is_part or not isinstance(layer_idx, int):
            raise UnsupportedModelError(
                f"{name} keeps a recurrent state in a way that is not known: not supported"
            )
        inside.update(module.modules())
        goes_on = _goes_on(type(module))
        mixers.append(Mixer(module, layer_idx, argument, goes_on, is_attention))
    return mixers


def names_in_forward(module_class: type) -> frozenset[str]:
    """The methods and globals that the forward of this class uses; none where it has none."""
    forward = getattr(module_class, "forward", None)
    forward = inspect.unwrap(forward) if callable(forward) else None
    return frozenset(forward.__code__.co_names if isinstance(forward, FunctionType) else ())


def _goes_on(module_class: type) -> bool:
    """Whether its forward gives the scan of several tokens a state to begin with, if it has one."""
    if "update_recurrent_state" not in names_in_forward(module_class):
        return True  # a convolution alone, whose inputs are joined
    try:
        source = inspect.getsource(inspect.unwrap(module_class.forward))  # type: ignore[attr-defined]
    except OSError:
        return False
    return re.search(r"\binitial_states?=", source) is not None


@contextmanager
def running_mixers(mixers: Sequence[Mixer], run: RunMixer) -> Iterator[None]:
    """Within this context the mixers' modules are called through `run`; afterwards as before."""
    for mixer in mixers:
        vars(mixer.module)["forward"] = partial(_call, mixer, mixer.module.forward, run)
    try:
        yield
    finally:
        for mixer in mixers:
            del vars(mixer.module)["forward"]


def _call(
    mixer: Mixer, forward: Forward, run: RunMixer, hidden_states: torch.Tensor, **kwargs: Any
) -> torch.Tensor | tuple[torch.Tensor, None]:
    output = run(mixer, forward, hidden_states, kwargs)
    return (output, None) if mixer.is_attention else output


def new_cache(num_layers: int) -> Any:
    """A cache of transformers with an empty state in each layer."""
    from transformers.cache_utils import Cache, LinearAttentionLayer

    cache: Any = Cache(layers=[LinearAttentionLayer(_MAX_STATES) for _ in range(num_layers)])
    cache.get_linear_cache = partial(_linear_cache, cache)
    cache.set_linear_cache = partial(_set_linear_cache, cache)
    return cache


def _linear_cache(cache: Any, layer_idx: int) -> torch.Tensor | None:
    layer = cache.layers[layer_idx]
    state: torch.Tensor = layer.recurrent_states[0]
    return state if layer.has_previous_state[0] else None


def _set_linear_cache(cache: Any, layer_idx: int, state: torch.Tensor) -> None:
    layer = cache.layers[layer_idx]
    layer.recurrent_states[0] = state
    layer.is_recurrent_states_initialized[0] = True


def put_state(cache: Any, tensor: StateTensor, values: torch.Tensor, *, is_fresh: bool) -> None:
    """Have a mixer find `values` [batch, *shape]; is_fresh: memory for what it leaves, no state."""
    layer = cache.layers[tensor.layer]
    # Of all that the layer could keep: older transformers ask whether each of them is there.
    layer.has_previous_state = dict.fromkeys(range(_MAX_STATES), not is_fresh)
    if tensor.kind == "conv":
        layer.conv_states[tensor.idx] = values
        layer.is_conv_states_initialized[tensor.idx] = True
        layer.conv_kernel_size[tensor.idx] = values.shape[-1]
    else:
        layer.recurrent_states[tensor.idx] = values
        layer.is_recurrent_states_initialized[tensor.idx] = True
    layer.device, layer.dtype = values.device, values.dtype


def take_state(cache: Any, tensor: StateTensor) -> torch.Tensor:
    """What the mixer has left: [batch, *shape]."""
    layer = cache.layers[tensor.layer]
    states = layer.conv_states if tensor.kind == "conv" else layer.recurrent_states
    left: torch.Tensor = states[tensor.idx]
    return left


def probe_state(model: Any) -> tuple[StateTensor, ...]:
    """What the model keeps of a sequence in its mixers, seen in a forward of two tokens; nothing
    where it has none. Raises UnsupportedModelError for what cannot be called by parts."""
    from flexinfer.attention.hook import use_probe

    mixers = find_mixers(model)
    if not mixers:
        return ()
    states = StateProbe(1 + max(mixer.layer_idx for mixer in mixers))

    def look(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        *others: Any,
    ) -> torch.Tensor:  # fmt: skip
        if states.is_mixing:
            raise UnsupportedModelError(
                f"{type(module).__name__} keeps a state inside of its attention: not supported"
            )
        return query.new_zeros(query.shape[1], query.shape[0], value.shape[2])

    mixing = running_mixers(mixers, states.run)
    with torch.inference_mode(), mixing, use_probe(model, look, set()):
        model(
            input_ids=torch.zeros(1, 2, dtype=torch.int64, device=model.device),
            position_ids=torch.arange(2, device=model.device)[None],
            use_cache=False,
        )
    return states.tensors()


class StateProbe:
    """Runs mixers on the tokens of the probe, and looks at what they keep."""

    def __init__(self, num_layers: int) -> None:
        self._cache = new_cache(num_layers)
        self.is_mixing = False
        """Whether a mixer is running."""

    def run(
        self, mixer: Mixer, forward: Forward, hidden_states: torch.Tensor, others: dict[str, Any]
    ) -> torch.Tensor:
        name = type(mixer.module).__name__
        for argument, value in others.items():
            is_known = argument in HARMLESS_ARGUMENTS or argument in CACHE_ARGUMENTS
            if value is not None and not is_known:
                raise UnsupportedModelError(f"{name} takes {argument!r}: not supported")
        self.is_mixing = True
        output = mixer.call(forward, hidden_states, self._cache)
        self.is_mixing = False
        if not isinstance(output, torch.Tensor) or output.shape[:2] != hidden_states.shape[:2]:
            raise UnsupportedModelError(f"{name} gives more than its output: not supported")
        return output

    def tensors(self) -> tuple[StateTensor, ...]:
        """What each sequence keeps, in the order of layers."""
        tensors: list[StateTensor] = []
        for layer_idx, layer in enumerate(self._cache.layers):
            for idx in range(_MAX_STATES):
                if layer.is_conv_states_initialized[idx]:
                    tensors.append(_describe(layer_idx, "conv", idx, layer.conv_states[idx]))
                if layer.is_recurrent_states_initialized[idx]:
                    values = layer.recurrent_states[idx]
                    tensors.append(_describe(layer_idx, "recurrent", idx, values))
        return tuple(tensors)


def _describe(layer_idx: int, kind: Any, idx: int, values: torch.Tensor) -> StateTensor:
    shape = tuple(values.shape[1:])
    return StateTensor(layer_idx, kind, shape, dtype_name(values.dtype), values.element_size(), idx)
