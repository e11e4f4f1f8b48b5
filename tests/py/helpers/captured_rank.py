"""A rank whose compiled model runs as it was captured, without generated code: that takes long.

As a program it is such a rank: `spawn_captured` starts it in the place of the ranks that `_spawn`
of `flexinfer.distributed.group` would start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch


def capture_only(put: Callable[[Any, str, Any], None]) -> None:
    """put: as setattr."""
    put(torch, "compile", partial(torch.compile, backend="aot_eager"))


def spawn_captured(meeting: Any) -> subprocess.Popen[bytes]:
    """In the place of `flexinfer.distributed.group._spawn`."""
    from flexinfer.distributed import group

    variables = {group.VARIABLE: json.dumps(group.vars_of(meeting))}
    return subprocess.Popen([sys.executable, __file__], env={**os.environ, **variables})


if __name__ == "__main__":
    from flexinfer.distributed.rank import serve_rank

    capture_only(setattr)
    serve_rank()
    os._exit(0)
