"""What a process holds, and of that its weights as they are laid out and its KV."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "serving"))

from process_memory import MIB, PeakMemory

from flexinfer import LLM


def memory_of(llm: LLM) -> dict[str, float]:
    """MiB; `beside` is the rest."""
    seen: set[int] = set()
    weights = 0
    for module in llm.llm_engine.loaded.model.modules():
        own = getattr(module, "nbytes", None)
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if own is not None and not any(tensor.numel() for tensor in tensors):
            weights += own
        for tensor in tensors:
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                weights += tensor.nbytes
    kv = llm.llm_engine.manager.stats().resident_bytes
    resident = PeakMemory().see()
    return {
        "resident_mib": resident / MIB,
        "weights_mib": weights / MIB,
        "kv_mib": kv / MIB,
        "beside_mib": (resident - weights - kv) / MIB,
    }
