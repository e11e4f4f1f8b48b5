"""The hook into transformers: its models call `attention_forward` for each layer.

    transformers layer -> attention_forward -> operator flexinfer::attention -> backend of the step

The model runs once per step on the flat batch; what the call means is not in its arguments but in a
context that the caller sets around it (`use_attention`). The operator in the middle is opaque to
torch.compile: the model stays one graph, and the step is looked up when the graph runs. To torch it
is a pure function of its arguments; that it also writes K and V into the arena is known only here.
Masks are made by the backends, so the mask function gives none; the probe refuses masks that a
backend could not know of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cache
from itertools import count
from typing import Any

import torch

from flexinfer.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    AttentionOptions,
    KernelCall,
)
from flexinfer.attention.latent import latent_of
from flexinfer.attention.selection import attend_selected
from flexinfer.errors import UnsupportedModelError
from flexinfer.runtime.torch_operators import define_operators

ATTENTION_NAME = "flexinfer"
PROBE_NAME = "flexinfer_probe"
NAMES = (ATTENTION_NAME, PROBE_NAME)

ProbeCall = Callable[
    [torch.nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, AttentionOptions, dict[str, Any]],
    torch.Tensor,
]
"""(module, query, key, value, options, other arguments) -> output.

query: [num_heads, num_tokens, dim], key and value: [num_kv_heads, num_tokens, dim];
output: [num_tokens, num_heads, dim].
"""

_step: ContextVar[tuple[AttentionBackend, AttentionMetadata] | None] = ContextVar(
    "flexinfer_step", default=None
)
_calls: ContextVar[Iterator[int] | None] = ContextVar("flexinfer_calls", default=None)
_probe: ContextVar[ProbeCall | None] = ContextVar("flexinfer_probe", default=None)
_windows: ContextVar[set[int | None] | None] = ContextVar("flexinfer_windows", default=None)


@contextmanager
def use_attention(
    model: torch.nn.Module,
    backend: AttentionBackend,
    metadata: AttentionMetadata,
    *,
    counts_calls: bool = False,
) -> Iterator[None]:
    """Within this context `model` computes the step that `metadata` describes through `backend`;
    afterwards it attends as before.

    counts_calls: KV stands in the order of the calls of attention, and not by `layer_idx`; then
    this is for one forward.
    """
    token = _step.set((backend, metadata))
    calls = _calls.set(count() if counts_calls else None)
    try:
        with _attend_through(model, ATTENTION_NAME):
            yield
    finally:
        _calls.reset(calls)
        _step.reset(token)


@contextmanager
def attending_for(rows: torch.Tensor) -> Iterator[None]:
    """Within this context attention is wanted of these rows of the step alone: those of others may
    be anything."""
    backend, metadata = _require_step()
    token = _step.set((backend, replace(metadata, wanted_rows=rows.tolist())))
    try:
        yield
    finally:
        _step.reset(token)


def step_in_force() -> tuple[AttentionBackend, AttentionMetadata] | None:
    """Whom and what `use_attention` has set; None: nobody."""
    return _step.get()


def kernel_call(
    layer_idx: int,
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    s_aux: torch.Tensor | None = None,
) -> KernelCall | None:
    """What a call of attention would do in the step in force, for a kernel that computes more than
    it; None: attention can only be called."""
    step = _step.get()
    if step is None or _calls.get() is not None:
        return None
    backend, metadata = step
    options = _options_of(backend, layer_idx, scaling, sliding_window, softcap, s_aux)
    return backend.kernel_call(layer_idx, num_heads, head_dim, dtype, options, metadata)


@contextmanager
def use_probe(model: torch.nn.Module, call: ProbeCall, windows: set[int | None]) -> Iterator[None]:
    """Within this context `model` attends through `call`; afterwards as before.

    `windows` collects the sliding windows of the masks that the model asks for; None: no window.
    """
    token, windows_token = _probe.set(call), _windows.set(windows)
    try:
        with _attend_through(model, PROBE_NAME):
            yield
    finally:
        _probe.reset(token)
        _windows.reset(windows_token)


@contextmanager
def _attend_through(model: torch.nn.Module, name: str) -> Iterator[None]:
    register()
    config: Any = model.config
    before = config._attn_implementation, getattr(config, "pad_token_id", None)
    config._attn_implementation = name
    # Where there is one, GPT-2 and some others look for it in each input: a question to the GPU.
    vars(config)["pad_token_id"] = None  # not checked: some configs want a number
    try:
        yield
    finally:
        config._attn_implementation, vars(config)["pad_token_id"] = before


@cache
def register() -> torch.library.Library:
    """Make the names known to transformers and the operator to torch; once a process."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    AttentionInterface.register(PROBE_NAME, probe_forward)
    # The engine's name has no mask function: transformers then makes no mask and asks no question
    # of the positions, whose answer would cost a synchronisation with the GPU in every step.
    AttentionMaskInterface.register(PROBE_NAME, probe_mask)
    return define_operators(
        (
            "attention(Tensor query, Tensor key, Tensor value, int layer_idx, float? scaling, "
            "int? sliding_window, float? softcap, Tensor? sinks) -> Tensor",
            attention_operator,
            attention_shape,
        )
    )


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """AttentionInterface function: query, key, value [1, heads, num_tokens, dim]."""
    calls = None if torch.compiler.is_compiling() else _calls.get()
    layer_idx: Any = module.layer_idx if calls is None else next(calls)
    latent = latent_of(module)
    if latent is not None:
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        query = latent.fold(query)
    selected: torch.Tensor | None = kwargs.get("indices")
    output: torch.Tensor
    if selected is not None and selected.shape[2]:
        backend, metadata = _require_step()
        options = AttentionOptions(scaling, sliding_window, softcap, s_aux)
        layer = backend.layers[layer_idx]
        output = attend_selected(layer, query[0], key[0], value[0], options, selected[0], metadata)
    else:
        # The operator is for the compiler alone: through torch it costs ten microseconds per layer.
        call: Any = attention_operator
        if torch.compiler.is_compiling():
            call = torch.ops.flexinfer.attention
        output = call(
            query[0], key[0], value[0], layer_idx, scaling, sliding_window, softcap, s_aux
        )
    return (output[None] if latent is None else latent.unfold(output[None])), None


def attention_operator(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer_idx: int,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """flexinfer::attention: `AttentionBackend.forward` of the backend and the step in force."""
    backend, metadata = _require_step()
    options = _options_of(backend, layer_idx, scaling, sliding_window, softcap, sinks)
    return backend.forward(layer_idx, query, key, value, options, metadata)


def _options_of(
    backend: AttentionBackend,
    layer_idx: int,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> AttentionOptions:
    """Of a layer's call, with what its arena knows."""
    layer = backend.layers[layer_idx]
    window = layer.window if sliding_window is None else sliding_window
    return AttentionOptions(scaling, window, softcap, sinks, layer.chunk)


def _require_step() -> tuple[AttentionBackend, AttentionMetadata]:
    step = _step.get()
    if step is None:
        raise RuntimeError("this model is set to attend through FlexInfer, outside of its engine")
    return step


def attention_shape(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any
) -> torch.Tensor:
    """What torch.compile sees of flexinfer::attention: [num_tokens, num_heads, dim]."""
    return query.new_empty(query.shape[1], query.shape[0], value.shape[2])


def probe_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """AttentionInterface function of the probe, which also sees what the engine's ignores."""
    call = _probe.get()
    if call is None:
        raise RuntimeError("this model is set to be probed by FlexInfer, outside of the probe")
    options = AttentionOptions(scaling, sliding_window, softcap, s_aux)
    kwargs["attention_mask"] = attention_mask
    latent = latent_of(module)
    if latent is not None:
        query = latent.fold(query)
    output = call(module, query[0], key[0], value[0], options, kwargs)[None]
    return (output if latent is None else latent.unfold(output)), None


def probe_mask(*, use_vmap: bool = False, local_size: int | None = None, **kwargs: Any) -> None:
    """AttentionMaskInterface function of the probe: refuses what the backend could not know of."""
    if use_vmap:
        raise UnsupportedModelError("the model overlays the causal mask with one of its own")
    windows = _windows.get()
    if windows is not None:
        windows.add(local_size)
