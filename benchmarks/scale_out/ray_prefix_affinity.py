"""Ray Serve LLM's PrefixCacheAffinityRouter from its own source: its package imports vLLM."""

from __future__ import annotations

from pathlib import Path

import ray

FOLDER = Path(ray.__file__).parent / "llm/_internal/serve/routing_policies/prefix_aware"
TREE_IMPORT = """\
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import (
    PrefixTreeActor,
)
"""


def _run(name: str) -> None:
    file = FOLDER / name
    source = file.read_text()
    assert name == "prefix_tree.py" or TREE_IMPORT in source
    exec(compile(source.replace(TREE_IMPORT, ""), str(file), "exec"), globals())


_run("prefix_tree.py")
_run("prefix_aware_router.py")
