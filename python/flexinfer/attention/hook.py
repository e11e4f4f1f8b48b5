"""The hook into transformers: its models call `attention_forward` for each layer.

The model runs once a step on the flat batch; what the call means is not in its arguments but in a
context that the caller sets around it (`use_attention`). Outside of one, the call is an error.
Masks are made by the backends, so the mask function gives none; it refuses masks that a backend
could not know of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch

from flexinfer.attention.base import AttentionOptions
from flexinfer.errors import UnsupportedModelError

ATTENTION_NAME = "flexinfer"

AttentionCall = Callable[
    [torch.nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, AttentionOptions, dict[str, Any]],
    torch.Tensor,
]
"""(module, query, key, value, options, other arguments) -> output.

query: [num_heads, num_tokens, dim], key and value: [num_kv_heads, num_tokens, dim];
output: [num_tokens, num_heads, dim].
"""

_call: ContextVar[AttentionCall | None] = ContextVar("flexinfer_attention", default=None)
_windows: ContextVar[set[int] | None] = ContextVar("flexinfer_windows", default=None)


@contextmanager
def use_attention(
    model: torch.nn.Module, call: AttentionCall, windows: set[int] | None = None
) -> Iterator[None]:
    """Within this context `model` attends through `call`; afterwards it is as it was before.

    `windows` collects the sliding windows of the masks that the model asks for.
    """
    register()
    config: Any = model.config
    before = config._attn_implementation
    token, windows_token = _call.set(call), _windows.set(windows)
    config._attn_implementation = ATTENTION_NAME
    try:
        yield
    finally:
        config._attn_implementation = before
        _call.reset(token)
        _windows.reset(windows_token)


@cache
def register() -> None:
    """Make the name known to transformers; once a process."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, no_mask)


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
    call = _call.get()
    if call is None:
        raise RuntimeError("this model is set to attend through FlexInfer, outside of its engine")
    options = AttentionOptions(scaling, sliding_window, softcap, s_aux)
    kwargs["attention_mask"] = attention_mask
    return call(module, query[0], key[0], value[0], options, kwargs)[None], None


def no_mask(*, use_vmap: bool = False, local_size: int | None = None, **kwargs: Any) -> None:
    """AttentionMaskInterface function: causal and sliding masks are made by the backend."""
    if use_vmap:
        raise UnsupportedModelError("the model overlays the causal mask with one of its own")
    windows = _windows.get()
    if windows is not None and local_size is not None:
        windows.add(local_size)
