"""Attention over the KV arena: `base` is the interface, one file an implementation.

`create(name)` makes one; `hook` connects it with transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flexinfer.attention.base import AttentionBackend, LayerKV

BACKENDS = ("sdpa",)


def check_name(name: str) -> None:
    """Raises ValueError if there is no backend called `name`."""
    if name not in BACKENDS:
        raise ValueError(f"attention_backend must be one of {', '.join(BACKENDS)}, got {name!r}")


def create(name: str, layers: Sequence[LayerKV]) -> AttentionBackend:
    """The backend called `name` over the arena `layers`. Raises ValueError for another name."""
    check_name(name)
    from flexinfer.attention.sdpa import SdpaAttention

    return SdpaAttention(layers)
