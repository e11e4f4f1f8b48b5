"""A decode kernel in Triton, with and without a page table: split over keys, then combined.

After Flash-Decoding (Dao et al., 2023): a program attends one KV head's group of queries over one
split of the keys, and a second kernel weighs the partial results by their log-sum-exp. The two
variants differ in one load, so that what a page table costs can be told from what a kernel costs.
"""

from __future__ import annotations

from typing import Any

import torch
from contiguous import Call, NotSupported
from problem import Problem

try:
    import triton
    import triton.language as tl
except ImportError as missing:
    MISSING: str | None = f"Triton: {missing}"
else:
    MISSING = None

BLOCK_TOKENS = 64
PROGRAMS_A_MULTIPROCESSOR = 4

if MISSING is None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _attend(
        q,
        k,
        v,
        table,
        lengths,
        partial,
        weights,
        scale,
        q_batch,
        q_head,
        k_outer,
        k_token,
        k_head,
        v_outer,
        v_token,
        v_head,
        table_batch,
        num_splits,
        GROUP: tl.constexpr,  # noqa: N803
        GROUP_PADDED: tl.constexpr,  # noqa: N803
        DIM: tl.constexpr,  # noqa: N803
        PAGE: tl.constexpr,  # noqa: N803
        BLOCK: tl.constexpr,  # noqa: N803
    ):
        """partial: [batch, kv_heads, splits, GROUP_PADDED, DIM] f32; weights: without DIM."""
        batch, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        num_kv_heads = tl.num_programs(1)
        length = tl.load(lengths + batch)
        share = tl.cdiv(tl.cdiv(length, num_splits), BLOCK) * BLOCK
        first = split * share
        last = tl.minimum(first + share, length)
        row = tl.arange(0, GROUP_PADDED)
        dim = tl.arange(0, DIM)
        in_group = row[:, None] < GROUP
        q_at = batch * q_batch + (head * GROUP + row)[:, None] * q_head + dim[None, :]
        q_tile = tl.load(q + q_at, mask=in_group, other=0.0)
        top = tl.full([GROUP_PADDED], -float("inf"), tl.float32)
        total = tl.zeros([GROUP_PADDED], tl.float32)
        acc = tl.zeros([GROUP_PADDED, DIM], tl.float32)
        slot = tl.load(table + batch * table_batch).to(tl.int64)
        for start in range(first, last, BLOCK):
            token = start + tl.arange(0, BLOCK)
            valid = token < last
            if PAGE == 0:
                outer = slot + tl.zeros([BLOCK], tl.int64)
                inner = token.to(tl.int64)
            else:
                at = table + batch * table_batch + token // PAGE
                outer = tl.load(at, mask=valid, other=0).to(tl.int64)
                inner = (token % PAGE).to(tl.int64)
            k_at = outer * k_outer + inner * k_token + head * k_head
            v_at = outer * v_outer + inner * v_token + head * v_head
            k_tile = tl.load(k + k_at[None, :] + dim[:, None], mask=valid[None, :], other=0.0)
            v_tile = tl.load(v + v_at[:, None] + dim[None, :], mask=valid[:, None], other=0.0)
            scores = tl.dot(q_tile, k_tile) * scale
            scores = tl.where(valid[None, :], scores, -float("inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            shrink = tl.exp(top - new_top)
            p = tl.exp(scores - new_top[:, None])
            total = total * shrink + tl.sum(p, 1)
            acc = acc * shrink[:, None] + tl.dot(p.to(v_tile.dtype), v_tile)
            top = new_top
        out_row = ((batch * num_kv_heads + head) * num_splits + split) * GROUP_PADDED + row
        safe = tl.where(total > 0, total, 1.0)
        tl.store(partial + out_row[:, None] * DIM + dim[None, :], acc / safe[:, None])
        tl.store(weights + out_row, tl.where(total > 0, top + tl.log(safe), -float("inf")))

    @triton.jit  # type: ignore[untyped-decorator]
    def _combine(
        partial,
        weights,
        out,
        num_splits,
        GROUP: tl.constexpr,  # noqa: N803
        GROUP_PADDED: tl.constexpr,  # noqa: N803
        DIM: tl.constexpr,  # noqa: N803
        SPLITS_PADDED: tl.constexpr,  # noqa: N803
    ):
        """out: [batch, kv_heads * GROUP, DIM], dense; a program does one query head."""
        batch_head, row = tl.program_id(0), tl.program_id(1)
        split = tl.arange(0, SPLITS_PADDED)
        dim = tl.arange(0, DIM)
        at = (batch_head * num_splits + split) * GROUP_PADDED + row
        exists = split < num_splits
        logs = tl.load(weights + at, mask=exists, other=-float("inf"))
        share = tl.exp(logs - tl.max(logs, 0))
        parts = tl.load(partial + at[:, None] * DIM + dim[None, :], mask=exists[:, None], other=0.0)
        mixed = tl.sum(parts * share[:, None], 0) / tl.sum(share, 0)
        target = out + (batch_head * GROUP + row) * DIM + dim
        tl.store(target, mixed.to(out.dtype.element_ty))


def choose_splits(device: torch.device, batch: int, num_kv_heads: int, max_len: int) -> int:
    """Enough programs to fill the device, each with at least a few blocks of keys."""
    programs = PROGRAMS_A_MULTIPROCESSOR
    if device.type == "cuda":
        programs *= torch.cuda.get_device_properties(device).multi_processor_count
    wanted = -(-programs // (batch * num_kv_heads))
    return max(1, min(wanted, max_len // (4 * BLOCK_TOKENS), 64))


def check_usable(device: torch.device) -> None:
    """Raises NotSupported where Triton cannot run."""
    if MISSING is not None:
        raise NotSupported(MISSING)
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise NotSupported("Triton needs CUDA (or TRITON_INTERPRET=1)")


def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    page_size: int,
    num_splits: int,
) -> torch.Tensor:
    """One query per request over k, v [slots or pages, tokens, kv_heads, dim], of any strides but
    the last, which is 1. A launcher asks the driver about k and v: both begin in mapped memory.

    q: [batch, heads, dim], as what is returned; lengths: [batch] int32; table: [batch, 1] slots,
    counted from the one at which k and v begin, where `page_size` is 0, else [batch, pages] page
    numbers; int32.
    """
    batch, num_heads, dim = q.shape
    num_kv_heads = k.shape[2]
    group = num_heads // num_kv_heads
    padded = max(16, triton.next_power_of_2(group))
    size = (batch, num_kv_heads, num_splits, padded)
    partial = torch.empty((*size, dim), dtype=torch.float32, device=q.device)
    weights = torch.empty(size, dtype=torch.float32, device=q.device)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    constants: dict[str, Any] = {"GROUP": group, "GROUP_PADDED": padded, "DIM": dim}
    _attend[(batch, num_kv_heads, num_splits)](
        q,
        k,
        v,
        table,
        lengths,
        partial,
        weights,
        dim**-0.5,
        *q.stride()[:2],
        *k.stride()[:3],
        *v.stride()[:3],
        table.stride(0),
        num_splits,
        PAGE=page_size,
        BLOCK=BLOCK_TOKENS,
        **constants,
    )
    _combine[(batch * num_kv_heads, group)](
        partial,
        weights,
        out,
        num_splits,
        SPLITS_PADDED=triton.next_power_of_2(num_splits),
        **constants,
    )
    return out


def make_decode(
    problem: Problem, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, page_size: int
) -> Call:
    """`decode` of the problem's queries, from slot 0 on."""
    check_usable(problem.device)
    shape = problem.shape
    if shape.new_tokens > 1:
        raise NotSupported("a decode kernel")
    splits = choose_splits(problem.device, shape.batch, shape.num_kv_heads, shape.seq_len)
    q, lengths = problem.q[:, 0], problem.lengths()
    return lambda: decode(q, k, v, table, lengths, page_size, splits)[:, None]
