"""Every attention kernel of benchmarks/kernels says what attention written out in float32 says.

On plain tensors, on vTensor arenas of each layout, and on pages. On the CPU these are torch's SDPA
and the gathering one; on a GPU whatever is installed.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

for folder in ("gpu_common", "full_budget", "kernels"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks" / folder))

import contiguous
import paged
from problem import Problem, Shape, error_of, make_queries
from sources import ArenaSource, Layout, open_source

SHAPES = (
    Shape(3, 65, 8, 2, 128),
    Shape(2, 700, 8, 8, 128),
    Shape(2, 300, 32, 1, 64),
    Shape(2, 333, 8, 2, 128, new_tokens=40),
)
LAYOUTS = (Layout("plain"), Layout("dense", 1), Layout("interleaved", 4))
MAX_ERROR = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}


ON_CPU = {"sdpa", "gather+sdpa"}


def cases(names: Iterable[str]) -> list[Any]:
    """(device, kernel): those that the CPU has there, all on a GPU."""
    on_cpu = [("cpu", name) for name in names if name in ON_CPU]
    return on_cpu + [pytest.param("cuda", name, marks=pytest.mark.gpu) for name in names]


def refusal(
    device: str, make_call: contiguous.Kernel, layout: Layout, shape: Shape, dtype: torch.dtype
) -> str | None:
    """Checks one kernel on one problem, every request; why not, where the kernel can not do it."""
    torch.manual_seed(0)
    with open_source(layout, [shape], 4, device, dtype) as source:
        problem = source.problem(shape)
        try:
            output = make_call(problem)()
        except contiguous.NotSupported as reason:
            return str(reason)
        assert output.shape == problem.q.shape
        for request in range(shape.batch):
            assert error_of(problem, output, request) <= MAX_ERROR[dtype], (layout, shape)
    return None


def check_all(
    device: str, make_call: contiguous.Kernel, layouts: Iterable[Layout], dtype: torch.dtype
) -> None:
    """One kernel on all shapes and layouts that it admits; skips if it admits none."""
    refusals = [
        refusal(device, make_call, layout, shape, dtype) for layout in layouts for shape in SHAPES
    ]
    if None not in refusals:
        pytest.skip("; ".join(sorted({str(reason) for reason in refusals})))


@pytest.mark.parametrize(("device", "name"), cases(contiguous.KERNELS), indirect=["device"])
def test_contiguous_kernels_match_the_reference(device: str, name: str) -> None:
    check_all(device, contiguous.KERNELS[name], LAYOUTS, torch.bfloat16)


@pytest.mark.parametrize(("device", "name"), cases(paged.KERNELS), indirect=["device"])
def test_paged_kernels_match_the_reference(device: str, name: str) -> None:
    page_size, make = paged.KERNELS[name]
    check_all(
        device,
        lambda problem: make(problem, paged.cut(problem, page_size)),
        LAYOUTS[:1],
        torch.bfloat16,
    )


@pytest.mark.slow
def test_flex_attention_over_pages_matches_the_reference_on_the_cpu() -> None:
    """The GPU's call, compiled for the CPU: half a minute a shape."""
    shape = Shape(batch=2, seq_len=300, num_heads=8, num_kv_heads=2, head_dim=64)
    torch.manual_seed(0)
    k, v = torch.randn(2, 2, 300, 2, 64)
    problem = Problem(shape, make_queries(shape, torch.float32, "cpu"), k, v)
    output = paged.make_flex(problem, paged.cut(problem, 128))()
    assert max(error_of(problem, output, request) for request in range(2)) < 1e-5


@pytest.mark.parametrize("page_size", [0, 16])
def test_the_triton_kernel_matches_in_float16(device: str, page_size: int) -> None:
    """float16, because Triton's interpreter (TRITON_INTERPRET=1, for the CPU) knows no bfloat16."""

    def make_call(problem: Problem) -> contiguous.Call:
        if page_size == 0:
            return contiguous.triton_decode(problem)
        return paged.triton_decode(problem, paged.cut(problem, page_size))

    check_all(device, make_call, LAYOUTS if page_size == 0 else LAYOUTS[:1], torch.float16)


def test_the_triton_kernel_needs_no_memory_in_slots_that_it_does_not_read(device: str) -> None:
    """Triton asks the driver about each pointer: it gets a view that begins in mapped memory."""
    shape = Shape(3, 200, 8, 2, 128)
    torch.manual_seed(0)
    with open_source(Layout("dense", 1), [shape], 4, device, torch.float16) as source:
        whole = source.problem(shape)
        assert isinstance(source, ArenaSource)
        source.release(0)
        k, v = whole.k[1:], whole.v[1:]
        problem = Problem(dataclasses.replace(shape, batch=2), whole.q[1:], k, v)
        try:
            output = contiguous.triton_decode(problem)()
        except contiguous.NotSupported as reason:
            pytest.skip(str(reason))
        assert error_of(problem, output, 1) <= MAX_ERROR[torch.float16]
