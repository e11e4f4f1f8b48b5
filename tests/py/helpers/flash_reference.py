"""flash-attn's functions as slow exact CPU code: same arguments, same demands, same meaning.

What the real kernels refuse or would read wrongly is an AssertionError here: dtypes, shapes, int32,
contiguous last dimensions, 16-byte alignment, and, for those that load whole tiles (versions 3 and
4), anything that is not a number anywhere in the tensors they are shown.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

HALVES = (torch.float16, torch.bfloat16)


class Reference:
    """A module: its functions are attributes. `dtypes` other than halves are for exact tests."""

    loads_whole_tiles = False
    no_window: Any = -1

    def __init__(self, dtypes: tuple[torch.dtype, ...] = HALVES) -> None:
        self.dtypes = dtypes
        self.calls: list[str] = []

    def check(self, *tensors: torch.Tensor) -> None:
        for x in tensors:
            assert x.dtype in self.dtypes, x.dtype
            assert x.dtype == tensors[0].dtype
            assert x.stride(-1) == 1, "the last dimension must be contiguous"
            assert x.shape[-1] % 8 == 0
            assert x.shape[-1] <= 256
            assert x.data_ptr() % 16 == 0, "loads of 16 bytes"
            for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
                assert size <= 1 or stride * x.element_size() % 16 == 0, "loads of 16 bytes"

    def check_tiles(self, *tensors: torch.Tensor) -> None:
        if self.loads_whole_tiles:
            assert all(torch.isfinite(x).all() for x in tensors), "a tile reaches past the end"

    def flash_attn_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[Any, Any] = (-1, -1),
        softcap: float = 0.0,
    ) -> torch.Tensor:
        self.calls.append("func")
        self.check(q, k, v)
        self.check_tiles(k, v)
        assert q.dim() == k.dim() == 4
        assert k.shape == v.shape
        assert k.shape[0] == q.shape[0]
        outputs = [
            attend(*one, softmax_scale, causal, self.window(window_size), softcap)
            for one in zip(q, k, v, strict=True)
        ]
        return torch.stack(outputs)

    def flash_attn_varlen_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[Any, Any] = (-1, -1),
        softcap: float = 0.0,
    ) -> torch.Tensor:
        self.calls.append("varlen")
        self.check(q, k, v)
        self.check_tiles(k, v)
        assert q.dim() == k.dim() == 3
        assert k.shape == v.shape
        output = torch.full_like(q, torch.nan)
        for (q0, q1), (k0, k1) in zip(
            pairs(cu_seqlens_q, max_seqlen_q), pairs(cu_seqlens_k, max_seqlen_k), strict=True
        ):
            window = self.window(window_size)
            output[q0:q1] = attend(
                q[q0:q1], k[k0:k1], v[k0:k1], softmax_scale, causal, window, softcap
            )
        return output

    def joined(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The pages of each sequence, one behind the other."""
        assert block_table.dtype == torch.int32
        assert k_cache.shape[1] % 256 == 0, "pages of a multiple of 256"
        self.check(k_cache, v_cache)
        return tuple(x[block_table.long()].flatten(1, 2) for x in (k_cache, v_cache))

    def window(self, window_size: tuple[Any, Any]) -> tuple[int, int] | None:
        if window_size == (self.no_window, self.no_window):
            return None
        assert all(isinstance(side, int) and side >= 0 for side in window_size)
        return window_size


class FlashAttn2(Reference):
    def flash_attn_with_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        rotary_cos: None = None,
        rotary_sin: None = None,
        cache_seqlens: int | torch.Tensor | None = None,
        cache_batch_idx: torch.Tensor | None = None,
        cache_leftpad: None = None,
        block_table: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        return_softmax_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        self.calls.append("with_kvcache")
        batch_size, num_queries, num_heads, head_dim = q.shape
        if block_table is not None:
            k_cache, v_cache = self.joined(k_cache, v_cache, block_table)
        assert cache_seqlens is not None
        if isinstance(cache_seqlens, int):
            cache_seqlens = torch.full((k_cache.shape[0],), cache_seqlens, dtype=torch.int32)
        if cache_batch_idx is None:
            assert k_cache.shape[0] == batch_size
            cache_batch_idx = torch.arange(batch_size, dtype=torch.int32)
        self.check(q, k_cache, v_cache)
        num_kv_heads = k_cache.shape[2]
        assert k_cache.shape == v_cache.shape
        assert k_cache.shape[3] == head_dim
        check_int32(cache_seqlens, batch_size)
        check_int32(cache_batch_idx, batch_size)
        assert num_heads % num_kv_heads == 0
        group = num_heads // num_kv_heads if num_queries == 1 and window_size == (-1, -1) else 1
        num_stored = 0 if k is None else num_queries
        if k is not None:
            assert v is not None
            self.check(q, k, v)
            assert k.shape == v.shape == (batch_size, num_queries, num_kv_heads, head_dim)
            assert num_queries * group <= k_cache.shape[1], "the cache looks shorter than q"
        output = torch.full_like(q, torch.nan)
        lse = torch.full((batch_size, num_heads, num_queries), torch.nan)
        for i, (length, slot) in enumerate(
            zip(cache_seqlens.tolist(), cache_batch_idx.tolist(), strict=True)
        ):
            end = length + num_stored
            assert 0 < end <= k_cache.shape[1]
            if k is not None and v is not None:
                k_cache[slot, length:end] = k[i]
                v_cache[slot, length:end] = v[i]
            stored = k_cache[slot, :end], v_cache[slot, :end]
            window = self.window(window_size)
            output[i] = attend(q[i], *stored, softmax_scale, causal, window, softcap)
            if return_softmax_lse:
                assert (causal, window, softcap) == (False, None, 0.0), "lse of plain scores only"
                lse[i] = log_sum_exp(q[i], stored[0], softmax_scale)
        return (output, lse) if return_softmax_lse else output


class FlashAttn3(Reference):
    loads_whole_tiles = True


class FlashAttn4(Reference):
    loads_whole_tiles = True
    no_window = None


class TorchOperator(Reference):
    """aten::_flash_attention_forward."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cum_seq_q: torch.Tensor | None,
        cum_seq_k: torch.Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        seqused_k: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None, None, None, None]:
        assert dropout_p == 0.0
        assert is_causal
        assert not return_debug_mask
        window = None
        if window_size_left is not None and window_size_right is not None:
            window = (window_size_left, window_size_right)
        if cum_seq_q is None or cum_seq_k is None:
            output = self.flash_attn_func(query, key, value, scale, is_causal, window or (-1, -1))
            return output, None, None, None, None
        self.calls.append("varlen")
        self.check(query, key, value)
        assert key.dim() == 3
        assert key.shape == value.shape
        lengths = cum_seq_k.diff() if seqused_k is None else seqused_k
        check_int32(lengths, cum_seq_q.shape[0] - 1)
        assert cum_seq_k.dtype == torch.int32
        assert cum_seq_k.shape == cum_seq_q.shape
        output = torch.full_like(query, torch.nan)
        for (q0, q1), k0, length in zip(
            pairs(cum_seq_q, max_q), cum_seq_k[:-1].tolist(), lengths.tolist(), strict=True
        ):
            assert length <= max_k
            stored = key[k0 : k0 + length], value[k0 : k0 + length]
            output[q0:q1] = attend(query[q0:q1], *stored, scale, is_causal, window, 0.0)
        return output, None, None, None, None


def check_int32(x: torch.Tensor, size: int) -> None:
    assert x.dtype == torch.int32
    assert x.is_contiguous()
    assert x.shape == (size,)


def pairs(cu_seqlens: torch.Tensor, longest: int) -> list[tuple[int, int]]:
    assert cu_seqlens.dtype == torch.int32
    assert cu_seqlens.is_contiguous()
    ends = cu_seqlens.tolist()
    found = list(itertools.pairwise(ends))
    assert all(0 <= end - start <= longest for start, end in found)
    return found


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
    causal: bool,
    window: tuple[int, int] | None,
    softcap: float,
) -> torch.Tensor:
    """One sequence, [tokens, heads, dim] each, aligned at the last key."""
    num_queries, num_heads, head_dim = q.shape
    num_keys, num_kv_heads, _ = k.shape
    group = num_heads // num_kv_heads
    keys = k.double().repeat_interleave(group, dim=1)
    values = v.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys)
    scores *= 1 / math.sqrt(head_dim) if scale is None else scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(num_queries)[:, None] + num_keys - num_queries
    column = torch.arange(num_keys)[None]
    hidden = column > position if causal else torch.zeros(num_queries, num_keys, dtype=torch.bool)
    if window is not None:
        hidden |= (column < position - window[0]) | (column > position + window[1])
    weights = torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)


def log_sum_exp(q: torch.Tensor, k: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Natural, of one sequence's unmasked scores: [heads, queries] float32."""
    keys = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys)
    scores *= 1 / math.sqrt(q.shape[2]) if scale is None else scale
    return scores.logsumexp(-1).float()
