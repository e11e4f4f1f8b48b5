"""A rank whose part of a step fails, at a chosen stage, while BAD_PROMPT is computed.

As a program it is such a rank: `spawn_failing` starts it in the place of the ranks that `_spawn` of
`flexinfer.distributed.group` would start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

BAD_PROMPT = [5, 6, 101, 7, 8, 9]
STAGES = ("inputs", "attention", "mlp", "head")
VARIABLE = "FLEXINFER_TEST_STAGE"


def fail_at(stage: str, put: Callable[[Any, str, Any], None]) -> None:
    """put: as setattr."""
    from flexinfer.layers.parallel import GatheredLinear, ReducedLinear
    from flexinfer.runner.inputs import InputBuilder
    from flexinfer.runner.model_runner import ModelRunner

    owner, name, at_call = {
        "inputs": (InputBuilder, "build", 0),
        "attention": (ReducedLinear, "forward", 0),
        "mlp": (ReducedLinear, "forward", 3),
        "head": (GatheredLinear, "forward", 0),
    }[stage]
    real_compute, real = ModelRunner.compute, getattr(owner, name)
    calls_left: list[int] = []  # until it fails

    def compute(self: Any, plan: Any) -> Any:
        is_bad = np.array(BAD_PROMPT, np.int32).tobytes() in plan.token_ids
        calls_left[:] = [at_call] * is_bad
        return real_compute(self, plan)

    def fails(self: Any, *args: Any) -> Any:
        if calls_left:
            calls_left[0] -= 1
            if calls_left[0] < 0:
                raise ZeroDivisionError(f"bad prompt in {stage}")
        return real(self, *args)

    put(ModelRunner, "compute", compute)
    put(owner, name, fails)


def spawn_failing(stage: str) -> Callable[[Any], subprocess.Popen[bytes]]:
    """In the place of `flexinfer.distributed.group._spawn`."""

    def spawn(meeting: Any) -> subprocess.Popen[bytes]:
        from flexinfer.distributed import group

        variables = {group.VARIABLE: json.dumps(group.vars_of(meeting)), VARIABLE: stage}
        return subprocess.Popen([sys.executable, __file__], env={**os.environ, **variables})

    return spawn


if __name__ == "__main__":
    from flexinfer.distributed.rank import serve_rank

    fail_at(os.environ[VARIABLE], setattr)
    serve_rank()
    os._exit(0)
