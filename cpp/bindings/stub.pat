# What nanobind's stub generator cannot see: the exception classes, which errors.cpp makes by hand so
# that they have Python bases and attributes. Same order and bases as there.
_vtensor\.__prefix__:
    class VTensorError(Exception): ...

    class OutOfMemoryError(VTensorError, MemoryError):
        asked_bytes: int
        free_bytes: int
        budget_bytes: int

    class DriverError(VTensorError):
        call: str
        code: int
        code_name: str
        arguments: str

    class MappingLimitError(DriverError): ...

    class ReleasedError(VTensorError, LookupError): ...

    class IntegrityError(VTensorError): ...
