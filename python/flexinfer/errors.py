"""The exception tree. Expected shortage is a value, never one of these.

    Exception
    └── VTensorError                everything this package raises on purpose
        ├── OutOfMemoryError        physical memory or the budget is exhausted    (+ MemoryError)
        ├── DriverError             a driver call failed: call, code, code_name, arguments
        │   └── MappingLimitError   the system's limit on mappings is near
        ├── ReleasedError           a vTensor or manager was used after release   (+ LookupError)
        ├── IntegrityError          check_integrity() found a broken invariant
        ├── UnsupportedModelError   the model's attention cannot run here         (+ ValueError)
        ├── HandoverError           a parcel of KV that cannot be adopted here    (+ ValueError)
        ├── TraceError              a trace file that cannot be replayed          (+ ValueError)
        ├── RequestError            a request that can never be served            (+ ValueError)
        └── EngineError             the step that computed a request failed       (+ RuntimeError)
            └── EngineDeadError     the engine has stopped, and serves no more
                └── RankError       because one of its ranks failed: rank

Other caller mistakes are ``ValueError`` or ``LookupError`` with the offending value.
"""

from __future__ import annotations

from flexinfer._vtensor import (
    DriverError,
    IntegrityError,
    MappingLimitError,
    OutOfMemoryError,
    ReleasedError,
    VTensorError,
)

__all__ = [
    "DriverError",
    "EngineDeadError",
    "EngineError",
    "HandoverError",
    "IntegrityError",
    "MappingLimitError",
    "OutOfMemoryError",
    "RankError",
    "ReleasedError",
    "RequestError",
    "TraceError",
    "UnsupportedModelError",
    "VTensorError",
]


class UnsupportedModelError(VTensorError, ValueError):
    """The model's architecture or attention cannot run on vTensors."""


class HandoverError(VTensorError, ValueError):
    """A parcel of KV that cannot be handed over, or adopted here; the message says why."""


class TraceError(VTensorError, ValueError):
    """A trace file that is not a trace, was cut off, or cannot be replayed; names the line."""


class RequestError(VTensorError, ValueError):
    """A request that can never be served as it was submitted."""


class EngineError(VTensorError, RuntimeError):
    """The step that computed a request failed; `__cause__` says why. Other requests go on."""


class EngineDeadError(EngineError):
    """The engine was shut down, or failed in a way it cannot go on from (`__cause__`)."""


class RankError(EngineDeadError):
    """A process of a tensor-parallel engine died, hung, failed or disagrees: `rank` says which."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(f"rank {rank} {message}")
        self.rank = rank
        self.message = message

    def __reduce__(self) -> tuple[type[RankError], tuple[int, str]]:
        return RankError, (self.rank, self.message)
