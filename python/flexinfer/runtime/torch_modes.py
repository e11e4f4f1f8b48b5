"""Modes of torch that a caller may be in, which are not meant for the engine's own work.

vLLM's engine is a process of its own, which no `with torch.autocast(...)` of its caller reaches.
Here loading and steps run in the caller's thread, and would take its modes over:

1. inference mode: tensors made in it cannot be written by other threads, which loading has do that;
2. autocast: some of a layer's products would come in another dtype than its KV;
3. a default device: what the engine makes on the host would be made there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def plain_modes() -> Iterator[None]:
    """Without such modes, in this thread, for some time. Does not load torch."""
    torch = sys.modules.get("torch")
    if torch is None:  # then nobody is in any
        yield
        return
    with ExitStack() as modes:
        if torch.is_inference_mode_enabled():
            modes.enter_context(torch.inference_mode(False))
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                modes.enter_context(torch.autocast(device, enabled=False))
        if torch.get_default_device().type != "cpu":
            modes.enter_context(torch.device("cpu"))
        yield
