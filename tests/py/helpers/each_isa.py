"""The fixture of a test that runs on every instruction set which this CPU has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch


def each_isa(module: ModuleType, isas: Sequence[str]) -> Callable[..., Any]:
    """A fixture `isa`: `module` computes with the kernel of each in turn, on two threads."""

    @pytest.fixture(params=isas)
    def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
        kernel = module.make_kernel(request.param)
        monkeypatch.setattr(module, "kernel", lambda: kernel)
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        yield request.param
        torch.set_num_threads(before)

    return isa
