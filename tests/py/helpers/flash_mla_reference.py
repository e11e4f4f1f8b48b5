"""The package flash_mla as slow exact CPU code: same arguments, same demands, same meaning.

What the real kernel refuses, or would read where there may be no memory, is an AssertionError here:
its own checks (csrc/api/dense_decode.h), and numbers that are none anywhere in the pages that it
copies, which are whole ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

HALVES = (torch.float16, torch.bfloat16)
PAGE = 64


@dataclass
class Plan:
    """FlashMLASchedMeta: filled by the first call, for calls of the same shapes and lengths."""

    made_for: tuple[tuple[int, ...], list[int]] | None = None


class FlashMlaPackage:
    """A module: its functions are attributes. `dtypes` other than halves are for exact tests."""

    __version__ = "1.0.0"

    def __init__(self, dtypes: tuple[torch.dtype, ...] = HALVES) -> None:
        self.dtypes = dtypes
        self.num_calls = 0
        self.num_plans = 0

    def get_mla_metadata(self, *args: object, **kwargs: object) -> tuple[Plan, None]:
        self.num_plans += 1
        return Plan(), None

    def flash_mla_with_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        block_table: torch.Tensor | None,
        cache_seqlens: torch.Tensor | None,
        head_dim_v: int,
        tile_scheduler_metadata: Plan,
        num_splits: None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        is_fp8_kvcache: bool = False,
        indices: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.num_calls += 1
        assert block_table is not None
        assert cache_seqlens is not None
        assert indices is None
        assert num_splits is None
        assert not is_fp8_kvcache
        batch_size, num_queries, num_heads, width = q.shape
        self.check(q, k_cache, block_table, cache_seqlens)
        assert num_queries == 1, "the stand-in knows decodes alone, where causal says nothing"
        assert head_dim_v == 512
        lengths = cache_seqlens.tolist()
        key = ((*q.shape, *k_cache.shape[1:]), lengths)
        assert tile_scheduler_metadata.made_for in (None, key), "a plan for other lengths or shapes"
        tile_scheduler_metadata.made_for = key
        scale = width**-0.5 if softmax_scale is None else softmax_scale
        output = q.new_empty(batch_size, 1, num_heads, head_dim_v)
        lse = torch.empty(batch_size, num_heads, 1)
        assert torch.isfinite(k_cache[0]).all(), "page 0 is read for steps behind the last page"
        for i, (length, numbers) in enumerate(zip(lengths, block_table.tolist(), strict=True)):
            assert length > 0, "an empty sequence gives no log-sum-exp"
            assert all(0 <= number < k_cache.shape[0] for number in numbers)
            pages = k_cache[numbers[: -(-length // PAGE)]]
            assert torch.isfinite(pages).all(), "a page reaches past the end"
            keys = pages.flatten(0, 1)[:length, 0].float()
            scores = q[i, 0].float() @ keys.T * scale
            lse[i, :, 0] = scores.logsumexp(-1)
            output[i, 0] = (scores.softmax(-1) @ keys[:, :head_dim_v]).to(q.dtype)
        return output, lse

    def check(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        block_table: torch.Tensor,
        cache_seqlens: torch.Tensor,
    ) -> None:
        """dense_decode.h, and what TMA asks of addresses."""
        assert q.dtype in self.dtypes
        assert k_cache.dtype == q.dtype
        assert q.shape[3] in (512, 576)
        assert k_cache.shape[1:] == (PAGE, 1, q.shape[3])
        assert q.is_contiguous()
        assert k_cache.stride(-1) == 1
        assert k_cache.data_ptr() % 16 == 0
        assert all(stride * k_cache.element_size() % 16 == 0 for stride in k_cache.stride()[:3])
        for x, shape in ((block_table, q.shape[:1]), (cache_seqlens, q.shape[:1])):
            assert x.dtype == torch.int32
            assert x.is_contiguous()
            assert x.shape[:1] == shape
        assert int(cache_seqlens.max()) <= block_table.shape[1] * PAGE
