"""The exception tree. Expected shortage is a value, never one of these.

    Exception
    └── VTensorError                everything this package raises on purpose
        ├── OutOfMemoryError        physical memory or the budget is exhausted    (+ MemoryError)
        ├── DriverError             a driver call failed: call, code, code_name, arguments
        │   └── MappingLimitError   the system's limit on mappings is near
        ├── ReleasedError           a vTensor or manager was used after release   (+ LookupError)
        ├── IntegrityError          check_integrity() found a broken invariant
        ├── UnsupportedModelError   the model's attention cannot run here         (+ ValueError)
        └── RequestError            a request that can never be served            (+ ValueError)

Other caller mistakes are ``ValueError`` or ``LookupError`` with the offending value.
"""

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
    "IntegrityError",
    "MappingLimitError",
    "OutOfMemoryError",
    "ReleasedError",
    "RequestError",
    "UnsupportedModelError",
    "VTensorError",
]


class UnsupportedModelError(VTensorError, ValueError):
    """The model's architecture or attention cannot run on vTensors."""


class RequestError(VTensorError, ValueError):
    """A request that can never be served as it was submitted."""
