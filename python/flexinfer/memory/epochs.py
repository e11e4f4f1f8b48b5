"""KernelEpoch: tells the manager from when to when a step's kernels may read its memory.

    begin_step() | kernels are launched | end_step(stream): an event follows the last of them

Whatever would unmap, remap or reuse what they read waits for the event first; where the step's
tokens have been read already, nothing waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from flexinfer.vtensor import VTensorManager

logger = logging.getLogger(__name__)


class KernelEpoch:
    """`with` around the launch of a step's kernels: until they are over, nothing that they may read
    is unmapped, remapped or reused (see `VTensorManager.end_step`).

    `current_stream` gives the handle of the stream that they were issued to.
    """

    def __init__(
        self,
        manager: VTensorManager,
        current_stream: Callable[[], int],
        device: AbstractContextManager[object] | None = None,
    ) -> None:
        self._manager = manager
        self._current_stream = current_stream
        self._device = nullcontext() if device is None else device

    def __enter__(self) -> None:
        self._device.__enter__()
        self._manager.begin_step()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            self._manager.end_step(self._current_stream())
        except Exception:
            if error is None:
                raise
            logger.exception("the step could not be closed")  # what failed first goes on
        finally:
            self._device.__exit__(kind, error, traceback)


def kernel_epoch(
    manager: VTensorManager, device: torch.device
) -> AbstractContextManager[object | None]:
    """The context for a step on `device`. On a CPU kernels are over when they return: no cost."""
    if device.type != "cuda":
        return nullcontext()
    import torch

    return KernelEpoch(
        manager,
        lambda: torch.cuda.current_stream(device).cuda_stream,
        torch.cuda.device(device),
    )
