"""On which device the running test's manager lies: ``cpu``, or ``cuda`` on the stand-in driver.

A test module asks for both by ``pytestmark = pytest.mark.usefixtures("kv_device")`` and opens its
managers with ``**kv_device.options()``. ``@kv_device.cpu_only`` is for what only the host driver
has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from helpers import dlpack
from helpers.standin_cuda import StandinCuda

cpu_only = pytest.mark.parametrize("kv_device", ["cpu"], indirect=True)

_current = "cpu"


def current() -> str:
    return _current


def options() -> dict[str, Any]:
    """Keyword arguments of VTensorManager; views become numpy arrays on either device."""
    if _current == "cpu":
        return {"device": "cpu", "from_dlpack": np.from_dlpack}
    return {"device": _current, "from_dlpack": dlpack.host_array}


@contextmanager
def use(device: str, standin: StandinCuda | None, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Managers lie on ``device`` here. On the stand-in: in the end no memory is alive in the
    driver, and no rule of CUDA's was broken. Its granularity is the host's, for small chunks."""
    global _current
    _current = device
    try:
        if standin is None:
            yield
            return
        patch.setenv("FLEXINFER_LIBCUDA", standin.path)
        standin.reset(granularity=4096)
        yield
        standin.check()
        standin.reset()
    finally:
        _current = "cpu"
