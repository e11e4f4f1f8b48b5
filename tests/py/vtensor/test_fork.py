"""A forked child may end and is told that a manager of its parent is none of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

PARENT = """
import os, sys
import numpy as np
from flexinfer.errors import VTensorError
from flexinfer.vtensor import KVSpec, VTensorManager

spec = KVSpec(num_layers=2, num_kv_heads=1, head_dim=64, max_seq_len=4096)
manager = VTensorManager(
    spec, "cpu", memory_budget="64MiB", chunk_bytes=4096, from_dlpack=np.from_dlpack
)
vtensor = manager.create()
vtensor.extend(100)
keys = vtensor.k(0)
keys[:] = 7
manager.pre_extend([vtensor], [1000])  # starts the worker, which a child lacks
manager.drain()

def refused(call):
    try:
        call()
    except VTensorError as error:
        assert "fork" in str(error), error
        return
    raise AssertionError("a child used its parent's manager")

child = os.fork()
if child == 0:
    {child}
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert (keys == 7).all()
vtensor.extend(2000)
manager.drain()
manager.check_integrity()
"""


@pytest.mark.parametrize(
    "child",
    [
        "pass",
        "del keys, vtensor, manager",
        "manager.close()",
        "refused(manager.stats)",
        "refused(manager.create)",
        "refused(lambda: vtensor.extend(2000))",
        "refused(lambda: manager.pre_extend([vtensor], [2000]))",
        "refused(manager.drain)",
        "refused(manager.sleep)",
    ],
)
def test_a_child_ends_and_its_calls_are_refused(child: str) -> None:
    code = PARENT.replace("{child}", child)
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
