"""FlashKernels: the flash attention functions that are installed, behind one interface.

Two jobs, and what may do them on a range whose end is not mapped:

                              decode on the arena      prefill on tensors that end with the request
    flash_attn (2)            yes, and stores the KV   yes
    torch's own (2)           yes (torch_flash.py)     yes
    flash_attn_interface (3)  no                       yes
    flash_attn.cute (4)       no                       yes

FlashAttention 2 loads keys one by one, under a predicate. 3 and 4 load whole tiles by TMA, past the
length that they are told, up to the end of the tensor's shape: on a vTensor that may be an unmapped
address (and in any cache it may be a NaN: Dao-AILab/flash-attention issues 1745, 2374). So they get
only tensors that end where the request ends. Nothing here needs a block table.

Functions are given to the constructors, so that tests can put a reference in their place.
"""

from __future__ import annotations

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from flexinfer.attention.base import AttentionMetadata, AttentionOptions, LayerKV

Kernel = TypeVar("Kernel")
MAX_HEAD_DIM = 256
"""Of all of them."""
SLICE_TOKENS = 256
"""The arena is shown to a decode kernel up to a multiple of this: the kernel splits its work by the
shape, so a short batch must not look max_seq_len long."""


@dataclass(frozen=True, slots=True)
class Scores:
    """How the kernels are told what `AttentionOptions` say."""

    scaling: float
    window: tuple[int, int]
    """Keys seen to the left and right of a query's own position; (-1, -1): all to the left."""
    softcap: float
    """0: none."""

    @classmethod
    def of(cls, options: AttentionOptions, head_dim: int) -> Scores:
        window = options.sliding_window
        return cls(
            scaling=head_dim**-0.5 if options.scaling is None else options.scaling,
            window=(-1, -1) if window is None else (window - 1, 0),
            softcap=options.softcap or 0.0,
        )


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """The decodes of one step, as the kernels want them: int32, on the device."""

    slots: torch.Tensor
    """[num_decodes]"""
    lengths: torch.Tensor
    """[num_decodes]: tokens with KV before this step."""
    ends: torch.Tensor
    """[num_decodes]: lengths + 1."""
    max_end: int
    """No end is larger; known on the host."""

    @classmethod
    def of(cls, metadata: AttentionMetadata) -> DecodeStep:
        lengths = metadata.decode_positions.to(torch.int32)
        decodes = metadata.segments[: metadata.num_decodes]
        return cls(
            slots=metadata.decode_slots.to(torch.int32),
            lengths=lengths,
            ends=lengths + 1,
            max_end=max(s.end for s in decodes),
        )


class DecodeKernel(ABC):
    """One token for each of many requests, straight on the arena."""

    name: str
    has_softcap: bool

    @abstractmethod
    def decode(
        self,
        layer: LayerKV,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        step: DecodeStep,
        scores: Scores,
    ) -> torch.Tensor:
        """Store key and value, attend.

        query: [num_decodes, num_heads, head_dim], as what is returned; key, value: [num_decodes,
        num_kv_heads, head_dim].
        """


class PrefillKernel(ABC):
    """Causal attention of many tokens, aligned at the last key."""

    name: str
    has_softcap: bool

    @abstractmethod
    def fresh(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_len: int,
        scores: Scores,
    ) -> torch.Tensor:
        """Prompts from their first tokens, packed: [num_tokens, heads, head_dim], not padded.

        cu_seqlens: [num_prompts + 1] int32, on the device.
        """

    @abstractmethod
    def prefixed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        """The last tokens of one request over all its keys.

        query: [num_tokens, num_heads, head_dim]; key, value: [end, num_kv_heads, head_dim].
        """


class Flash2(DecodeKernel, PrefillKernel):
    """The package flash-attn, versions 2.6 to 2.x (softcap came with 2.6)."""

    has_softcap = True

    def __init__(self, module: Any, version: str = "2") -> None:
        self.name = f"flash-attn {version}"
        self.with_kvcache = require(
            module.flash_attn_with_kvcache,
            ("k_cache", "v_cache", "cache_seqlens", "cache_batch_idx", "softcap"),
        )
        self._func = require(module.flash_attn_func, ("causal", "window_size", "softcap"))
        self._varlen = require(module.flash_attn_varlen_func, ("cu_seqlens_q", "softcap"))

    def decode(
        self,
        layer: LayerKV,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        step: DecodeStep,
        scores: Scores,
    ) -> torch.Tensor:
        shown = round_up(step.max_end, SLICE_TOKENS)
        output: torch.Tensor = self.with_kvcache(
            query[:, None],
            k_cache=layer.k[:, :shown],
            v_cache=layer.v[:, :shown],
            k=key[:, None],
            v=value[:, None],
            cache_seqlens=step.lengths,
            cache_batch_idx=step.slots,
            softmax_scale=scores.scaling,
            causal=True,
            window_size=scores.window,
            softcap=scores.softcap,
        )
        return output[:, 0]

    def fresh(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_len: int,
        scores: Scores,
    ) -> torch.Tensor:
        output: torch.Tensor = self._varlen(
            query,
            key,
            value,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=max_len,
            max_seqlen_k=max_len,
            softmax_scale=scores.scaling,
            causal=True,
            window_size=scores.window,
            softcap=scores.softcap,
        )
        return output

    def prefixed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        output: torch.Tensor = self._func(
            query[None],
            key[None],
            value[None],
            softmax_scale=scores.scaling,
            causal=True,
            window_size=scores.window,
            softcap=scores.softcap,
        )
        return output[0]


class Flash3(PrefillKernel):
    """FlashAttention 3 (`flash_attn_interface`), for Hopper. Never sees the arena's open end."""

    has_softcap = True

    def __init__(self, module: Any, version: str = "3") -> None:
        self.name = f"flash-attn {version}"
        self._func = require(module.flash_attn_func, ("causal", "window_size", "softcap"))
        self._varlen = require(module.flash_attn_varlen_func, ("cu_seqlens_q", "softcap"))

    def fresh(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_len: int,
        scores: Scores,
    ) -> torch.Tensor:
        return first(
            self._varlen(
                query,
                key,
                value,
                cu_seqlens_q=cu_seqlens,
                cu_seqlens_k=cu_seqlens,
                max_seqlen_q=max_len,
                max_seqlen_k=max_len,
                **self._arguments(scores),
            )
        )

    def prefixed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        return first(self._func(query[None], key[None], value[None], **self._arguments(scores)))[0]

    def _arguments(self, scores: Scores) -> dict[str, Any]:
        return {
            "softmax_scale": scores.scaling,
            "causal": True,
            "window_size": scores.window,
            "softcap": scores.softcap,
        }


class Flash4(Flash3):
    """FlashAttention 4 (`flash_attn.cute`), for Hopper and Blackwell.

    Compiles a kernel at the first use of each kind of call.
    """

    def _arguments(self, scores: Scores) -> dict[str, Any]:
        arguments = super()._arguments(scores)
        if scores.window == (-1, -1):
            arguments["window_size"] = (None, None)
        return arguments


def round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def first(result: Any) -> torch.Tensor:
    """The output; some versions return it in a tuple with the log-sum-exp."""
    output: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return output


def require(function: Callable[..., Any], arguments: tuple[str, ...]) -> Callable[..., Any]:
    """The function, if it knows these arguments. Raises TypeError: it is too old, or not it."""
    known = inspect.signature(function).parameters
    missing = [name for name in arguments if name not in known]
    if missing:
        raise TypeError(f"{function.__name__} has no argument {', '.join(missing)}: too old")
    return function


def installed(kind: Callable[..., Kernel], module_name: str) -> Kernel:
    """The kernels of an installed module. Raises ImportError, TypeError, AttributeError."""
    module = importlib.import_module(module_name)
    package = importlib.import_module(module_name.partition(".")[0])
    version = getattr(package, "__version__", None)
    return kind(module) if version is None else kind(module, str(version))
