"""Calls of kernels that only a GPU has, made once without one: references with the kernels' own
demands stand in their place, so that a wrong argument is found before a GPU is there."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from gpu.test_gpu_kernels import LAYOUTS, check_all, contiguous, paged, refusal
from helpers.flash_reference import FlashAttn2, FlashAttn3, TorchOperator

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks" / "kernels"))

import problem as problems


class Operator(TorchOperator):
    """Of equal lengths and one new token a request, where `is_causal` says nothing."""

    def __call__(self, q: Any, k: Any, v: Any, *others: Any, **options: Any) -> Any:
        starts_q, starts_k, max_q, max_k, dropout, is_causal, debug = others
        assert is_causal == (max_q > 1)
        return super().__call__(
            q, k, v, starts_q, starts_k, max_q, max_k, dropout, True, debug, **options
        )


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problems.Problem, "on_cuda", True)
    monkeypatch.setitem(sys.modules, "flash_attn", module(FlashAttn2()))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module(FlashAttn3()))
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", Operator())


def module(reference: Any) -> ModuleType:
    made = ModuleType("reference")
    if hasattr(reference, "flash_attn_with_kvcache"):
        made.flash_attn_with_kvcache = reference.flash_attn_with_kvcache  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize("name", ["torch-varlen", "flash-attn"])
def test_kernels_on_contiguous_kv(name: str) -> None:
    check_all("cpu", contiguous.KERNELS[name], LAYOUTS, torch.bfloat16)


def test_flash_attn_on_pages() -> None:
    page_size, make = paged.KERNELS["flash-attn"]
    check_all("cpu", lambda p: make(p, paged.cut(p, page_size)), LAYOUTS[:1], torch.bfloat16)


def test_a_version_without_this_function_is_no_error() -> None:
    """FlashAttention 3's reference here has none."""
    shape = problems.Shape(2, 64, 4, 2, 64)
    why = refusal("cpu", contiguous.KERNELS["flash-attn-3"], LAYOUTS[0], shape, torch.bfloat16)
    assert why is not None
    assert "flash_attn_with_kvcache" in why


@pytest.mark.parametrize("is_paged", [False, True])
def test_what_the_lean_build_left_out_is_told_and_no_failure(
    is_paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lean(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("this flash-attn was built for heads of 97 to 128\nat flash_api.cpp")

    monkeypatch.setattr(sys.modules["flash_attn"], "flash_attn_with_kvcache", lean)
    make: Any = contiguous.KERNELS["flash-attn"]
    if is_paged:
        make = lambda p: paged.flash_attn_2(p, paged.cut(p, 256))  # noqa: E731
    shape = problems.Shape(2, 64, 4, 2, 64)
    why = refusal("cpu", make, LAYOUTS[0], shape, torch.bfloat16)
    assert why == "this flash-attn was built for heads of 97 to 128"
