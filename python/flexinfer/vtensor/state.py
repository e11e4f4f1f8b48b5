"""StateGroup: layers that keep a recurrent state; StateLayout: where that of a sequence lies.

A state is a fixed number of bytes, whatever the length of the sequence: convolutions' last inputs
and the matrices of linear attention or Mamba. It is kept where KV is, in chunks of the one pool
under the one budget: a vTensor of `num_tokens` tokens, whose bytes are read as these tensors.

    plane 0  [ layer 0's convolution | layer 0's matrix | layer 2's convolution | ...   ] reserved
    plane 1  [ layer 1's matrix      | ...                                              ] reserved
              tokens 0 ............................................... num_tokens - 1
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Literal

from flexinfer.vtensor.groups import KVGroup, check_int, set_fields
from flexinfer.vtensor.planes import Plane, lasting_planes

MIN_TOKENS = 8
"""Of a state, so that a digest may be the tokens under which it is recorded."""
ALIGNMENT_BYTES = 64
"""Of each tensor in its plane: no kernel of torch wants more."""


@dataclass(frozen=True)
class StateTensor:
    """One tensor of the state of one sequence."""

    layer: int
    kind: Literal["conv", "recurrent"]
    shape: tuple[int, ...]
    dtype: str
    element_bytes: int
    idx: int = 0
    """Which of several that a layer has of this kind."""

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.element_bytes


@dataclass(frozen=True)
class StateGroup:
    """Layers that keep a state: so many bytes of each sequence, which each step replaces."""

    tensors: tuple[StateTensor, ...]

    retention: ClassVar[Literal["state"]] = "state"

    def __post_init__(self) -> None:
        set_fields(self, tensors=tuple(self.tensors))
        if not self.tensors:
            raise ValueError("a group of states has at least one tensor, got none")
        for tensor in self.tensors:
            check_int("a layer", tensor.layer, 0)
            if tensor.num_bytes < 1:
                raise ValueError(f"the state of layer {tensor.layer} has no bytes: {tensor}")

    @property
    def layers(self) -> tuple[int, ...]:
        """Ascending."""
        return tuple(sorted({tensor.layer for tensor in self.tensors}))


@dataclass(frozen=True)
class StatePlace:
    """Where one tensor begins in each slot of a plane."""

    plane: Plane
    offset_bytes: int


@dataclass(frozen=True)
class StateLayout:
    """
    Attributes:
        tensors: what a sequence keeps.
        places: where each of them lies.
        num_tokens: tokens of a vTensor that holds them; 0: nothing is kept.
    """

    tensors: tuple[StateTensor, ...] = ()
    places: tuple[StatePlace, ...] = ()
    num_tokens: int = 0

    @classmethod
    def of(cls, groups: Iterable[KVGroup], tensors: Sequence[StateTensor]) -> StateLayout:
        """Each tensor in the plane that is then the least full for its size. Raises ValueError
        where each plane of `groups` gives back what a window leaves: a state is kept whole."""
        if not tensors:
            return cls()
        planes = list(lasting_planes(groups))
        if not planes:
            raise ValueError(
                "a recurrent state lies where KV is kept for all tokens, and each layer of this "
                "model has a window"
            )
        used = dict.fromkeys(planes, 0)
        places = []
        for tensor in tensors:
            plane = min(planes, key=lambda p: (used[p] + tensor.num_bytes) / p.token_bytes)
            places.append(StatePlace(plane, used[plane]))
            used[plane] += -(-tensor.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        num_tokens = max(MIN_TOKENS, *(-(-used[plane] // plane.token_bytes) for plane in planes))
        return cls(tuple(tensors), tuple(places), num_tokens)
