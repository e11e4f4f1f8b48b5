"""Which of torch's kernels SDPA may take on a GPU, and who judges the trials of flash kernels."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer.attention import sdpa
from flexinfer.attention import select as choose
from flexinfer.attention.base import AttentionMetadata, AttentionOptions, LayerKV
from flexinfer.attention.segments import Segment
from flexinfer.attention.torch_flash import TorchFlash
from helpers.flash_kit import half_layers
from helpers.flash_reference import TorchOperator


class OnCuda(torch.Tensor):
    """A tensor of the CPU that says it is on a GPU."""

    is_cuda = True


def enabled() -> tuple[bool, ...]:
    kinds = ("flash", "mem_efficient", "math", "cudnn")
    return tuple(getattr(torch.backends.cuda, f"{kind}_sdp_enabled")() for kind in kinds)


@pytest.mark.parametrize(
    ("is_cuda", "expected"), [(True, (True, True, True, False)), (False, (True,) * 4)]
)
def test_cudnn_is_left_out_on_a_gpu_only(
    is_cuda: bool, expected: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, ...]] = []

    def look(q: Any, k: Any, v: Any, **options: Any) -> Any:
        seen.append(enabled())
        return q

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", look)
    arena = torch.zeros(2, 64, 2, 16)
    backend = sdpa.SdpaAttention([LayerKV(arena, arena.clone())])
    metadata = AttentionMetadata.build([Segment(0, 0, 5, 6), Segment(1, 1, 9, 10)], arena.device)
    query, kv = torch.zeros(4, 2, 16), torch.zeros(2, 2, 16)
    if is_cuda:
        query = query.as_subclass(OnCuda)
    backend.forward(0, query, kv, kv, AttentionOptions(), metadata)
    assert seen == [expected] * 2
    assert enabled() == (True,) * 4, "the process has its own choice back"


def test_trials_are_judged_without_any_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused kernel that cannot do this would else refuse every flash kernel."""

    def fail(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("cuDNN Frontend error: No valid execution plans built")

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", fail)
    backend, reasons = choose.choose(
        half_layers(), [choose.Candidate("torch", lambda: TorchFlash(TorchOperator()))]
    )
    assert reasons == []
    assert not isinstance(backend, sdpa.SdpaAttention)


def test_where_requests_start_is_made_once_per_step() -> None:
    """TorchFlash: the same for all layers; made anew for the next step, whatever its size."""
    from flexinfer.attention.flash_kernels import DecodeStep

    kernel = TorchFlash(TorchOperator())
    device = torch.device("cpu")
    metadata = AttentionMetadata.build([Segment(3, 0, 5, 6), Segment(1, 1, 9, 10)], device)
    step = DecodeStep.of(metadata)
    each, starts = kernel._starts_of(step, 100)
    assert (each.tolist(), starts.tolist()) == ([0, 1, 2], [300, 100, 0])
    assert kernel._starts_of(step, 100)[1] is starts
    assert kernel._starts_of(step, 50)[1].tolist() == [150, 50, 0]
    assert kernel._starts_of(DecodeStep.of(metadata), 50)[1] is not starts
