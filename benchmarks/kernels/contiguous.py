"""Kernels over contiguous KV: the same call for a vTensor's arena and for torch.empty.

Each entry takes a Problem and returns the call to be timed, whose result is
[batch, new_tokens, num_heads, head_dim]. NotSupported says why a kernel can not run.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from problem import Problem
from torch.nn.functional import scaled_dot_product_attention

from flexinfer.attention.torch_flash import count_rows_per_slot, flat_rows

Call = Callable[[], torch.Tensor]
Kernel = Callable[[Problem], Call]


LEAN_BUILD = "this flash-attn was built "
"""How a call begins that scripts/flash_attn_build.py left out answers."""


class NotSupported(Exception):  # noqa: N818 - a fact to be reported, not an error
    """The kernel is not installed, or can not do this; the text says why."""


def tell_lean_build(call: Call) -> Call:
    """The call; where flash-attn was built without what it needs, that is `NotSupported`."""

    def checked() -> torch.Tensor:
        try:
            return call()
        except RuntimeError as error:
            if LEAN_BUILD in str(error):
                raise NotSupported(str(error).splitlines()[0]) from None
            raise

    return checked


def sdpa(problem: Problem) -> Call:
    """torch's scaled_dot_product_attention, one call for the batch: all lengths are equal."""
    shape = problem.shape
    k = problem.k[: shape.batch, : shape.seq_len].transpose(1, 2)
    v = problem.v[: shape.batch, : shape.seq_len].transpose(1, 2)
    if shape.new_tokens == 1:  # the heads of a group become rows: no mask, no expansion
        group = shape.num_heads // shape.num_kv_heads
        q = problem.q.view(shape.batch, shape.num_kv_heads, group, shape.head_dim)
        size = problem.q.shape
        return lambda: scaled_dot_product_attention(q, k, v).reshape(size)
    from torch.nn.attention.bias import causal_lower_right

    q = problem.q.transpose(1, 2)
    if problem.device.type == "cpu":  # has no lower-right kernel: the mask is written out
        ones = torch.ones(shape.new_tokens, shape.seq_len, dtype=torch.bool)
        mask = ones.tril(shape.seq_len - shape.new_tokens)
    else:
        mask = causal_lower_right(shape.new_tokens, shape.seq_len)
    return lambda: scaled_dot_product_attention(
        q, k, v, attn_mask=mask, enable_gqa=shape.num_heads != shape.num_kv_heads
    ).transpose(1, 2)


def torch_varlen(problem: Problem) -> Call:
    """torch's own copy of FlashAttention-2, on the arena as one row of tokens.

    Its varlen entry takes an offset and a used length for each request: offset = slot x rows of a
    slot, so that nothing is packed. Needs the slot's stride to be whole tokens.
    """
    if not problem.on_cuda:
        raise NotSupported("torch's varlen attention needs CUDA")
    rows_a_slot = count_rows_per_slot(problem.k)
    if rows_a_slot == 0:
        raise NotSupported("the slot's stride is not a whole number of tokens")
    k, v = flat_rows(problem.k), flat_rows(problem.v)
    shape = problem.shape
    count = torch.arange(shape.batch + 1, dtype=torch.int32, device=problem.device)
    starts_q, starts_k, used = count * shape.new_tokens, count * rows_a_slot, problem.lengths()
    q = problem.q.flatten(0, 1)
    size = problem.q.shape
    forward = torch.ops.aten._flash_attention_forward
    return lambda: forward(
        q,
        k,
        v,
        starts_q,
        starts_k,
        shape.new_tokens,
        shape.seq_len,
        0.0,
        shape.new_tokens > 1,
        False,
        seqused_k=used,
    )[0].view(size)


def flash_attn_2(problem: Problem) -> Call:
    """flash-attn's flash_attn_with_kvcache on the arena, slots by cache_batch_idx."""
    return with_kvcache(problem, "flash_attn")


def flash_attn_3(problem: Problem) -> Call:
    """FlashAttention-3's flash_attn_with_kvcache."""
    return with_kvcache(problem, "flash_attn_interface")


def with_kvcache(problem: Problem, package: str) -> Call:
    """flash_attn_with_kvcache of that package: the call is the same in both."""
    if not problem.on_cuda:
        raise NotSupported(f"{package} needs CUDA")
    try:
        attend = importlib.import_module(package).flash_attn_with_kvcache
    except (ImportError, AttributeError) as error:
        raise NotSupported(f"{package}: {error}") from None
    lengths, slots = problem.lengths(), problem.slots()
    return tell_lean_build(
        lambda: attend(
            problem.q,
            problem.k,
            problem.v,
            cache_seqlens=lengths,
            cache_batch_idx=slots,
            causal=True,
        )
    )


def triton_decode(problem: Problem) -> Call:
    """This folder's Triton decode kernel, without a page table."""
    from triton_kernel import make_decode

    return make_decode(problem, problem.k, problem.v, problem.slots()[:, None], page_size=0)


KERNELS: dict[str, Kernel] = {
    "sdpa": sdpa,
    "torch-varlen": torch_varlen,
    "flash-attn": flash_attn_2,
    "flash-attn-3": flash_attn_3,
    "triton": triton_decode,
}
