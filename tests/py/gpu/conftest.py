"""Fixtures of the GPU tests.

Every body runs without a GPU in each `make test`, so that it is known to be right before one sees
it: on the CPU (host driver), and what needs no torch kernels on the CUDA driver over its stand-in.
On CUDA it is marked `gpu`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers.gpu_kit import Kit, StandinKit
from helpers.triton_interpreter import admit_numpy

admit_numpy()


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


DEVICES = ["cpu", "standin", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def kit(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kit]:
    """A kit on the device; closes its managers and checks their invariants at the end.

    "standin": the CUDA driver's code over the stand-in for its library, which counts broken rules.
    """
    if request.param == "standin":
        standin = request.getfixturevalue("standin_library")
        monkeypatch.setenv("FLEXINFER_LIBCUDA", standin.path)
        standin.reset(granularity=4096)
        kit: Kit = StandinKit(standin)
    else:
        if request.param == "cuda":
            require_torch_cuda()
        kit = Kit(request.param)
    yield kit
    kit.close()
    if request.param == "standin":
        standin.check()
        standin.reset()
