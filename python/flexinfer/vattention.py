"""The home of vAttention's interface for users: `from flexinfer import vattention`."""

from flexinfer.vtensor.vattention import (
    VAttention,
    alloc_reqid,
    cleanup,
    free_reqid,
    init_kvcache,
    num_free_kvblocks,
    step,
    step_async,
    vtensor,
)

__all__ = [
    "VAttention",
    "alloc_reqid",
    "cleanup",
    "free_reqid",
    "init_kvcache",
    "num_free_kvblocks",
    "step",
    "step_async",
    "vtensor",
]
