"""Attention over the KV arena: `base` is the interface, one file an implementation.

`create(name)` makes one; `hook` connects it with transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flexinfer.attention.base import AttentionBackend, LayerKV

BACKENDS = ("auto", "host", "sdpa")
"""auto: the best for the arena's device; host: our CPU kernel; sdpa: torch's, the reference."""


def check_name(name: str) -> None:
    """Raises ValueError if there is no backend called `name`."""
    if name not in BACKENDS:
        raise ValueError(f"attention_backend must be one of {', '.join(BACKENDS)}, got {name!r}")


def create(name: str, layers: Sequence[LayerKV]) -> AttentionBackend:
    """The backend called `name` over the arena `layers`. Raises ValueError for another name.

    Where the host kernel can not work on the layers, one warning says why, and SDPA is taken.
    """
    check_name(name)
    if name == "host" or (name == "auto" and layers[0].k.device.type == "cpu"):
        from flexinfer.attention.host import host_or_sdpa

        return host_or_sdpa(layers)
    from flexinfer.attention.sdpa import SdpaAttention

    return SdpaAttention(layers)
