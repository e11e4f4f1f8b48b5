"""Kernels over paged KV, the measured baseline: a pool of pages and a table of page numbers.

The pages of a request are drawn at random from the pool, as in a server that has run for a while.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from contiguous import Call, NotSupported
from problem import Problem
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class Pages:
    """K and V of a problem, cut into pages."""

    k: torch.Tensor
    """[num_pages, page_size, num_kv_heads, head_dim]"""
    v: torch.Tensor
    table: torch.Tensor
    """[batch, pages a request] int32: page j of request i is number table[i, j]."""


def cut(problem: Problem, page_size: int) -> Pages:
    """The problem's KV copied into randomly placed pages."""
    shape = problem.shape
    per_request = -(-shape.seq_len // page_size)
    num_pages = shape.batch * per_request
    table = torch.randperm(num_pages, device=problem.device).view(shape.batch, per_request)
    size = (num_pages, page_size, shape.num_kv_heads, shape.head_dim)
    pools = []
    for cache in (problem.k, problem.v):
        pool = torch.zeros(size, dtype=cache.dtype, device=cache.device)
        rows = torch.zeros(
            (per_request * page_size, *size[2:]), dtype=cache.dtype, device=cache.device
        )
        for i in range(shape.batch):
            rows[: shape.seq_len] = cache[i, : shape.seq_len]
            pool[table[i]] = rows.view(per_request, *size[1:])
        pools.append(pool)
    return Pages(pools[0], pools[1], table.to(torch.int32))


def gather(problem: Problem, pages: Pages) -> Call:
    """Pages gathered into a contiguous tensor, then SDPA: all that a kernel without paging can."""
    shape = problem.shape
    table = pages.table.long()
    group = shape.num_heads // shape.num_kv_heads
    if shape.new_tokens > 1:
        raise NotSupported("measured for decode only")
    q = problem.q.view(shape.batch, shape.num_kv_heads, group, shape.head_dim)

    def call() -> torch.Tensor:
        k = pages.k[table].flatten(1, 2)[:, : shape.seq_len].transpose(1, 2)
        v = pages.v[table].flatten(1, 2)[:, : shape.seq_len].transpose(1, 2)
        return scaled_dot_product_attention(q, k, v).reshape(problem.q.shape)

    return call


def torch_varlen(problem: Problem, pages: Pages) -> Call:
    """torch's copy of FlashAttention-2 with a block table (torch 2.12 or newer)."""
    if problem.device.type != "cuda":
        raise NotSupported("torch's varlen attention needs CUDA")
    schema = str(torch.ops.aten._flash_attention_forward.default._schema)
    if "block_table" not in schema:
        raise NotSupported(f"torch {torch.__version__} has no block table in its varlen attention")
    shape = problem.shape
    count = torch.arange(shape.batch + 1, dtype=torch.int32, device=problem.device)
    starts_q, starts_k = count * shape.new_tokens, count * shape.seq_len
    used, q, size = problem.lengths(), problem.q.flatten(0, 1), problem.q.shape
    forward = torch.ops.aten._flash_attention_forward
    return lambda: forward(
        q,
        pages.k,
        pages.v,
        starts_q,
        starts_k,
        shape.new_tokens,
        shape.seq_len,
        0.0,
        shape.new_tokens > 1,
        False,
        seqused_k=used,
        block_table=pages.table,
    )[0].view(size)


def flash_attn_2(problem: Problem, pages: Pages) -> Call:
    """flash-attn's flash_attn_with_kvcache with a block table."""
    if problem.device.type != "cuda":
        raise NotSupported("flash-attn needs CUDA")
    try:
        from flash_attn import flash_attn_with_kvcache
    except ImportError as error:
        raise NotSupported(f"flash-attn: {error}") from None
    lengths = problem.lengths()
    return lambda: flash_attn_with_kvcache(
        problem.q, pages.k, pages.v, cache_seqlens=lengths, block_table=pages.table, causal=True
    )


def triton_decode(problem: Problem, pages: Pages) -> Call:
    """This folder's Triton decode kernel with a page table: the same code, one load more."""
    from triton_kernel import make_decode

    return make_decode(problem, pages.k, pages.v, pages.table, page_size=pages.k.shape[1])


def flashinfer(problem: Problem, pages: Pages) -> Call:
    """FlashInfer's paged decode; planned once, as an engine does for all layers of a step."""
    if problem.device.type != "cuda" or problem.shape.new_tokens > 1:
        raise NotSupported("FlashInfer is measured for decode on CUDA only")
    try:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper
    except ImportError as error:
        raise NotSupported(f"FlashInfer: {error}") from None
    shape = problem.shape
    page_size = pages.k.shape[1]
    per_request = pages.table.shape[1]
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=problem.device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
    count = torch.arange(shape.batch + 1, dtype=torch.int32, device=problem.device)
    last = torch.full_like(problem.lengths(), (shape.seq_len - 1) % page_size + 1)
    wrapper.plan(
        count * per_request,
        pages.table.flatten(),
        last,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        page_size,
        data_type=problem.q.dtype,
    )
    q = problem.q[:, 0].contiguous()
    return lambda: wrapper.run(q, (pages.k, pages.v)).view(problem.q.shape)


KERNELS: dict[str, tuple[int, Callable[[Problem, Pages], Call]]] = {
    "gather+sdpa": (16, gather),
    "torch-varlen": (256, torch_varlen),
    "flash-attn": (256, flash_attn_2),
    "triton": (16, triton_decode),
    "flashinfer": (16, flashinfer),
}
"""Name -> page size in tokens, kernel. FlashAttention-2 takes multiples of 256 only."""
