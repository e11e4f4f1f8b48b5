"""Replicas of the server on Ray Serve. What needs Ray is imported when it is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def build_app(args: Mapping[str, Any]) -> Any:
    """The Serve application: `serve.run(build_app({...}))`, or in the file of `serve deploy`
    `import_path: flexinfer.ray:build_app`. The keys of `args` are the fields of `ReplicaOptions`.

    Raises ImportError without Ray, ValueError for what cannot be served, before any work.
    """
    from flexinfer.ray.options import ReplicaOptions

    options = ReplicaOptions.from_args(args)
    from flexinfer.ray.app import build

    return build(options)
