"""Sampling on the CPU by our own kernel: one token per row, in one call for all rows.

torch has no operator for it: softmax, cumulative sum and search are passes over the whole of the
logits, top_k and top_p sort them. The kernel (cpp/kernels/sampling) reads a row twice, and searches
the threshold that top_k, top_p and min_p come to without a sort.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from flexinfer import _kernels
from flexinfer.runtime.kernels import DTYPES
from flexinfer.runtime.openmp import start_threads_address
from flexinfer.sampling.random import uniforms


def supports(logits: torch.Tensor) -> bool:
    """Whether rows of these logits can be sampled here."""
    return logits.is_cpu and logits.dtype in DTYPES and logits.dim() == 2 and logits.shape[1] > 0


def sample_rows(
    logits: torch.Tensor,
    temperature: torch.Tensor | Sequence[float],
    top_k: Sequence[int],
    top_p: Sequence[float],
    min_p: Sequence[float],
    seeds: Sequence[int],
    counters: Sequence[int],
) -> list[int]:
    """One token id per row; -1 for a row with a NaN, or whose largest logit is not finite.

    logits: [rows, vocab_size], not changed. temperature: finite; 0 for the first of the largest
    logits. top_k: 0 or -1 for all. Of equal logits all are kept or none. A row's random number is
    that of its (seed, counter): the same row gives the same token in whatever batch.
    Raises ValueError for logits that `supports` refuses, and for other numbers of rows.
    """
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.tolist()
    return draw_rows(logits, temperature, top_k, top_p, min_p, uniforms(seeds, counters))


def draw_rows(
    logits: torch.Tensor,
    temperature: Sequence[float],
    top_k: Sequence[int],
    top_p: Sequence[float],
    min_p: Sequence[float],
    numbers: Sequence[float],
) -> list[int]:
    """As `sample_rows`, with the rows' random numbers in [0, 1) given."""
    if not supports(logits) or len(numbers) != len(logits):
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ValueError(
            f"sampling takes [rows, vocab_size] of {names} on the CPU and as many random numbers; "
            f"got {tuple(logits.shape)} {logits.dtype} on {logits.device} and {len(numbers)}"
        )
    rows = logits if logits.stride(1) == 1 else logits.contiguous()
    return kernel().sample(
        DTYPES[rows.dtype],
        rows.data_ptr(),
        rows.stride(0),
        rows.shape[1],
        temperature,
        top_k,
        top_p,
        min_p,
        numbers,
        torch.get_num_threads(),
    )


@cache
def kernel() -> _kernels.RowSampler:
    return make_kernel()


def make_kernel(isa: str = "") -> _kernels.RowSampler:
    """isa: instruction set, one of `available_isas()`; "": FLEXINFER_SIMD, or the best."""
    return _kernels.RowSampler(start_threads_address(), isa)
