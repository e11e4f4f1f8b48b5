"""The planes of a vTensor as bytes to send or receive: of layers that keep all every token, of
those with a window the rows that later queries read, none of what it has given back.

    plane that keeps all   [ sent .................................. ]
    plane of a window                  [ sent ...................... ]
                           row 0       first row that is kept         num_tokens
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from flexinfer.errors import HandoverError
from flexinfer.vtensor import VTensor, VTensorManager
from flexinfer.vtensor.planes import Plane, first_row_kept, lasting_planes, planes_of

if TYPE_CHECKING:
    import torch


class PlaneViews:
    """What is sent of each plane, as torch tensors of bytes over the vTensor's own memory. Valid
    within the `with`."""

    def __init__(self, vtensor: VTensor, *, is_state: bool = False) -> None:
        """is_state: it holds a recurrent state, which lies where nothing is given back."""
        self._vtensor = vtensor
        self._is_state = is_state
        self._views: list[Any] = []

    def __enter__(self) -> list[torch.Tensor]:
        import torch

        manager, num_tokens = manager_of(self._vtensor), self._vtensor.num_tokens
        planes = []
        for plane in planes_of(manager.spec.groups):
            if self._is_state and plane.window is not None:
                continue
            view = getattr(self._vtensor, plane.which)(plane.layer)
            start, end = _bounds(manager, plane, num_tokens)
            if start == end:
                continue
            self._views.append(view)
            memory = (ctypes.c_char * (end - start)).from_address(view.data_ptr() + start)
            planes.append(torch.frombuffer(memory, dtype=torch.uint8))
        return planes

    def __exit__(self, *_: object) -> None:
        self._views.clear()


def num_bytes_sent(manager: VTensorManager, num_tokens: int) -> int:
    """Of so many tokens, and of the state behind them where one is kept."""
    spec = manager.spec
    bounds = [_bounds(manager, plane, num_tokens) for plane in planes_of(spec.groups)]
    of_state = sum(plane.token_bytes for plane in lasting_planes(spec.groups))
    return sum(end - start for start, end in bounds) + spec.state.num_tokens * of_state


def create_room(manager: VTensorManager, salt: str, num_tokens: int) -> VTensor:
    """A vTensor for what another has sent of so many tokens: with windows it grows as the sender's
    did, and gives back what they leave, so that it needs no more memory than that. Raises
    OutOfMemoryError."""
    vtensor = manager.create(cache_salt=salt, expected_tokens=num_tokens)
    step = (manager.step_tokens if manager.spec.windows else None) or num_tokens
    try:
        for end in range(step, num_tokens + step, step):
            vtensor.extend(min(end, num_tokens))
            manager.forget([vtensor], [min(end, num_tokens)])
        if manager.spec.windows:
            manager.drain()
            _check_given_back(manager, vtensor)
    except BaseException:
        vtensor.release()
        raise
    return vtensor


def create_state(manager: VTensorManager, salt: str) -> VTensor | None:
    """A vTensor for a state that another has sent; None: the model keeps none."""
    num_tokens = manager.spec.state.num_tokens
    if num_tokens == 0:
        return None
    vtensor = manager.create(cache_salt=salt, expected_tokens=num_tokens)
    try:
        vtensor.extend(num_tokens)
    except BaseException:
        vtensor.release()
        raise
    return vtensor


def manager_of(vtensor: VTensor) -> VTensorManager:
    manager = vtensor._manager
    assert isinstance(manager, VTensorManager)
    return manager


def _bounds(manager: VTensorManager, plane: Plane, num_tokens: int) -> tuple[int, int]:
    """Bytes of the plane."""
    unit, chunk_bytes = manager.spec.plane_token_bytes, manager.chunk_bytes
    row = first_row_kept(plane.window, num_tokens, unit, chunk_bytes)
    end = num_tokens * plane.token_bytes
    return min(end, row * chunk_bytes * (plane.token_bytes // unit)), end


def _check_given_back(manager: VTensorManager, vtensor: VTensor) -> None:
    """What is not sent must not be there: it would be recorded as if it were KV."""
    spec, chunk_bytes, info = manager.spec, manager.chunk_bytes, vtensor.info()
    unit = spec.plane_token_bytes
    num_rows = -(-info.mapped_tokens * unit // chunk_bytes)
    num_given_back = num_rows * spec.row_chunks - info.mapped_bytes // chunk_bytes
    wanted = sum(
        kept.num_chunks * first_row_kept(kept.window, info.num_tokens, unit, chunk_bytes)
        for kept in spec.retentions()
    )
    if num_given_back != wanted:
        raise HandoverError("what a window has left could not be given back")
