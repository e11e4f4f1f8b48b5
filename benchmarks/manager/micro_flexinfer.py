"""FlexInfer's row for the peers' micro benchmark, the scenario that others run too.

    python benchmarks/manager/micro_flexinfer.py FOLDER [--device sim|cpu] [scenario options]

FOLDER holds `micro_common.py`, which defines scenario, timing and output (JSON lines); with it,
rows stand beside those of vLLM's KVCacheManager (`micro_vllm.py` there). Both run alone, pinned
to one core. `prepare` makes an int32 array of the prompt's list: all that a match needs.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from array import array
from pathlib import Path
from typing import Any

from flexinfer.vtensor import KVSpec, VTensor, VTensorManager

TOKENS_PER_CHUNK = 16
"""As many as the peers' blocks hold."""

_SPECS = {
    "sim": KVSpec(2, 1, 64, "float32", 8192),
    "cpu": KVSpec(2, 1, 16, "float32", 8192),
}


class Adapter:
    """What `micro_common.run` drives."""

    granularity = 1
    device = "sim"

    def __init__(self, capacity_tokens: int, caching: bool) -> None:
        spec = _SPECS[self.device]
        # A prompt's last, partly filled chunk counts whole; and so does each running request's.
        budget = (capacity_tokens + 2048 * TOKENS_PER_CHUNK) * spec.bytes_per_token
        self._manager = VTensorManager(
            spec,
            device=self.device,
            max_requests=256,
            memory_budget=budget,
            chunk_bytes=TOKENS_PER_CHUNK * spec.bytes_per_token,
        )
        self._caching = caching
        self._num_tokens: list[int] = []

    def prepare(self, tokens: list[int]) -> Any:
        return array("i", tokens)

    def match(self, tokens: Any) -> int:
        return self._manager.match_prefix(tokens)

    def alloc(self, tokens: Any) -> VTensor:
        vtensor = self._manager.create(tokens if self._caching else None)
        vtensor.extend(len(tokens))
        return vtensor

    def free(self, vtensor: VTensor) -> None:
        vtensor.release()

    def insert(self, tokens: Any) -> None:
        vtensor = self.alloc(tokens)
        vtensor.record_prefix(tokens)
        vtensor.release()

    def decode_step(self, vtensors: list[VTensor], row: list[int]) -> None:
        if len(self._num_tokens) != len(vtensors):
            self._num_tokens = [vtensor.num_tokens for vtensor in vtensors]
        self._num_tokens = [count + 1 for count in self._num_tokens]
        self._manager.extend(vtensors, self._num_tokens)

    def evict(self, num_tokens: int) -> None:
        self._manager.evict(num_tokens * self._manager.spec.bytes_per_token)


def main() -> None:
    """Run the peers' scenario on FlexInfer."""
    ours = argparse.ArgumentParser(add_help=False)
    ours.add_argument("folder", type=Path)
    ours.add_argument("--device", choices=sorted(_SPECS), default="sim")
    known, rest = ours.parse_known_args()
    sys.path.insert(0, str(known.folder))
    common: Any = importlib.import_module("micro_common")
    arguments = common.parser(__doc__).parse_args(rest)
    Adapter.device = known.device
    name = f"flexinfer-VTensorManager-{known.device}"
    common.run(arguments, Adapter, name, _version(), block_size=TOKENS_PER_CHUNK)


def _version() -> str:
    from importlib.metadata import version

    return version("flexinfer")


if __name__ == "__main__":
    main()
