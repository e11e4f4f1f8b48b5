"""Kernels over paged KV, the measured baseline: a pool of pages and a table of page numbers.

The pages of a request are drawn at random from the pool, as in a server that has run for a while.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from contiguous import Call, NotSupported, tell_lean_build
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
    if not problem.on_cuda:
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
    if not problem.on_cuda:
        raise NotSupported("flash-attn needs CUDA")
    try:
        from flash_attn import flash_attn_with_kvcache
    except ImportError as error:
        raise NotSupported(f"flash-attn: {error}") from None
    lengths = problem.lengths()
    return tell_lean_build(
        lambda: flash_attn_with_kvcache(
            problem.q, pages.k, pages.v, cache_seqlens=lengths, block_table=pages.table, causal=True
        )
    )


def triton_decode(problem: Problem, pages: Pages) -> Call:
    """This folder's Triton decode kernel with a page table: the same code, one load more."""
    from triton_kernel import make_decode

    return make_decode(problem, pages.k, pages.v, pages.table, page_size=pages.k.shape[1])


def flashinfer(problem: Problem, pages: Pages) -> Call:
    """FlashInfer's paged decode; planned once, as an engine does for all layers of a step."""
    if not problem.on_cuda or problem.shape.new_tokens > 1:
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


@functools.cache
def _compiled_flex(is_dynamic: bool) -> Callable[..., torch.Tensor]:
    """Compiled; past its limit of recompilations it fails, where torch would go on uncompiled."""
    from torch._dynamo import config
    from torch.nn.attention.flex_attention import flex_attention

    config.fail_on_recompile_limit_hit = True
    return torch.compile(flex_attention, dynamic=is_dynamic, fullgraph=True)


def flex(problem: Problem, pages: Pages) -> Call:
    """torch's FlexAttention over pages."""
    if not problem.on_cuda or problem.shape.new_tokens > 1:
        raise NotSupported("FlexAttention is measured for decode on CUDA only")
    return make_flex(problem, pages)


def make_flex(problem: Problem, pages: Pages) -> Call:
    """The pool is one long sequence, of which a request sees its own pages. Compiles: slow."""
    shape = problem.shape
    try:
        from torch.nn.attention.experimental._paged_attention import PagedAttention
        from torch.nn.attention.flex_attention import create_block_mask
    except ImportError as error:
        raise NotSupported(f"FlexAttention: {error}") from None
    (num_pages, page_size), per_request = pages.k.shape[:2], pages.table.shape[1]
    table, used = pages.table.long(), problem.lengths()
    paging = PagedAttention(num_pages, page_size, shape.batch, device=str(problem.device))
    paging.page_table[:, :per_request] = table
    order = torch.arange(per_request, device=problem.device).expand_as(table)
    paging.physical_to_logical.scatter_(1, table, order)
    sees = create_block_mask(
        lambda b, h, q, key: key < used[b],
        shape.batch,
        None,
        1,
        per_request * page_size,
        device=str(problem.device),
        BLOCK_SIZE=(page_size, page_size),
    )
    mask = paging.convert_logical_block_mask(sees)
    k, v = (pool.flatten(0, 1)[None].transpose(1, 2) for pool in (pages.k, pages.v))
    # Inductor's C++ template does not compile with sizes that are not known (torch 2.13).
    q, run = problem.q.transpose(1, 2), _compiled_flex(problem.device.type != "cpu")
    gqa = shape.num_heads != shape.num_kv_heads
    return lambda: run(q, k, v, block_mask=mask, enable_gqa=gqa).transpose(1, 2)


KERNELS: dict[str, tuple[int, Callable[[Problem, Pages], Call]]] = {
    "gather+sdpa": (16, gather),
    "torch-varlen": (256, torch_varlen),
    "flash-attn": (256, flash_attn_2),
    "triton": (16, triton_decode),
    "flex": (128, flex),
    "flashinfer": (16, flashinfer),
}
"""Name -> page size in tokens, kernel. FlashAttention-2 takes multiples of 256 only."""
