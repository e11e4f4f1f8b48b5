"""Numbers of a manager at rest: its worker holds a chunk for as long as it cleans or creates it."""

from __future__ import annotations

from flexinfer.vtensor import VTensorManager


def available_bytes(manager: VTensorManager) -> int:
    """Bytes that extend() could have, once the worker has nothing left to do."""
    manager.drain()
    return manager.available_bytes
