"""Attention over the KV arena: `base` is the interface, one file an implementation.

`create(name)` makes one; `hook` connects it with transformers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flexinfer.attention.base import AttentionBackend, LayerKV

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "flash", "host", "sdpa", "two_phase")
"""auto: the best for the arena's device; flash: flash-attn on CUDA; host: our CPU kernel; sdpa:
torch's, the reference; two_phase: the same, with what decodes share computed once."""
ALIASES = {"flash_attn": "flash", "torch_sdpa": "sdpa"}
"""vLLM's names, in any case."""


def check_name(name: str) -> str:
    """The backend's own name. Raises ValueError if there is none called `name`."""
    known = str(name).lower()
    known = ALIASES.get(known, known)
    if known not in BACKENDS:
        choices = ", ".join((*BACKENDS, *(alias.upper() for alias in ALIASES)))
        raise ValueError(f"attention_backend must be one of {choices}, got {name!r}")
    return known


def create(name: str, layers: Sequence[LayerKV]) -> AttentionBackend:
    """The backend called `name` over the arena `layers`. Raises ValueError for another name.

    Where it cannot work on them, one warning says why and what is taken instead.
    """
    known = check_name(name)
    if known == "two_phase":
        from flexinfer.attention.two_phase import TwoPhaseAttention

        return TwoPhaseAttention(layers)
    is_cuda = layers[0].k.device.type == "cuda"
    if is_cuda and known != "host":
        from flexinfer.attention.select import choose_cuda

        return choose_cuda(known, layers)
    if known == "sdpa":
        from flexinfer.attention.sdpa import SdpaAttention

        return SdpaAttention(layers)
    if known == "flash":
        logger.warning('attention_backend "flash" needs a CUDA device: "auto" is taken')
    from flexinfer.attention.host import host_or_sdpa

    return host_or_sdpa(layers)
