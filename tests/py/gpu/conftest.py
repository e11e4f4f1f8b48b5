"""Fixtures of the GPU tests.

Every body runs on two devices where it makes sense: on the CPU (host driver) in each `make test`,
so that it is known to be right before a GPU sees it, and on CUDA, marked `gpu`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers.gpu_kit import Kit


def require_torch_cuda() -> None:
    """Skip, with the reason, where the driver is there but torch can not use it."""
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} finds no CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: Any) -> str:
    """The device of the test."""
    name: str = request.param
    if name == "cuda":
        require_torch_cuda()
    return name


@pytest.fixture
def kit(device: str) -> Iterator[Kit]:
    """A kit on the device; closes its managers and checks their invariants at the end."""
    kit = Kit(device)
    yield kit
    kit.close()


@pytest.fixture
def cuda_kit() -> Iterator[Kit]:
    """For what only a GPU has."""
    require_torch_cuda()
    kit = Kit("cuda")
    yield kit
    kit.close()
