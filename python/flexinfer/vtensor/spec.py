"""KVSpec: the shape of a model's KV cache and how its layers lie in planes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise

from flexinfer import _vtensor
from flexinfer.vtensor.groups import ELEMENT_BYTES, KVGroup, check_int, dtype_name, set_fields
from flexinfer.vtensor.state import StateGroup, StateLayout, StateTensor

_MAX_LAYERS = 1 << 16


@dataclass(frozen=True)
class Retention:
    """Layers that keep the same tokens, whatever their shapes: their place in a row of chunks.

    Attributes:
        window: as in :class:`KVGroup`.
        token_bytes: of all these layers.
        first_chunk: of a row, the first that is theirs.
        num_chunks: of a row.
    """

    window: int | None
    num_layers: int
    token_bytes: int
    first_chunk: int
    num_chunks: int


@dataclass(frozen=True)
class KVSpec:
    """Shape of a model's KV cache: of one whose layers are all alike, or see :meth:`of_groups`.

    Attributes:
        dtype: as in :class:`KVGroup`.
        max_seq_len: tokens that one vTensor can hold.
        layers_per_plane: 1 is the dense layout (K and V of each layer in ranges of their own);
            ``num_layers``, the default, keeps all layers of a token side by side (interleaved).
        groups: layers of one shape each. The fields above are those of the first group where there
            are several, but for ``num_layers``, which counts all that keep KV.
        mixed: the groups that were given; none: all layers are alike.
        states: what layers with a state keep of each sequence (:class:`StateGroup`).
        state: where these lie, in a vTensor of its own for each sequence.
        element_bytes: bytes of one number.
        bytes_per_token: bytes of one token: K and V of all layers, and room that is left over in
            planes of layers with a window (:class:`KVGroup`).
        num_planes: virtual ranges of one vTensor.
        row_chunks: chunks of a row, the least that a vTensor grows by: one per plane, and more for
            planes with larger tokens than others.
        plane_token_bytes: bytes of one token in one chunk of a row.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "float32"
    max_seq_len: int = 4096
    layers_per_plane: int | None = None
    mixed: tuple[KVGroup, ...] = ()
    states: tuple[StateTensor, ...] = ()

    groups: tuple[KVGroup, ...] = field(init=False, repr=False, compare=False)
    element_bytes: int = field(init=False, repr=False, compare=False)
    bytes_per_token: int = field(init=False, repr=False, compare=False)
    num_planes: int = field(init=False, repr=False, compare=False)
    row_chunks: int = field(init=False, repr=False, compare=False)
    plane_token_bytes: int = field(init=False, repr=False, compare=False)
    state: StateLayout = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        set_fields(self, dtype=dtype_name(self.dtype))
        if self.layers_per_plane is None:
            set_fields(self, layers_per_plane=self.num_layers)
        for given in fields(self):
            if given.init and given.name not in ("dtype", "mixed", "states"):
                check_int(given.name, getattr(self, given.name))
        if self.num_layers > _MAX_LAYERS:
            raise ValueError(f"num_layers {self.num_layers} overflows: at most {_MAX_LAYERS}")
        set_fields(self, groups=self.mixed or (self._uniform(),))
        core = self.core()
        set_fields(
            self,
            element_bytes=ELEMENT_BYTES[self.dtype],
            bytes_per_token=core.bytes_per_token(),
            num_planes=core.num_planes(),
            row_chunks=core.row_chunks(),
            plane_token_bytes=core.token_bytes(),
            state=StateLayout.of(self.groups, self.states),
        )
        if self.state.num_tokens > self.max_seq_len:
            raise ValueError(
                f"the state of a sequence takes the room of {self.state.num_tokens} tokens, more "
                f"than max_seq_len {self.max_seq_len}, which a vTensor holds: raise it"
            )

    @classmethod
    def of_groups(
        cls,
        groups: Iterable[KVGroup | StateGroup],
        max_seq_len: int = 4096,
        num_layers: int | None = None,
    ) -> KVSpec:
        """A cache whose layers differ: each layer that keeps KV stands in one group of KV, and one
        that keeps a state in one of states (some keep both).

        ``num_layers``: how many layers there are, if each of them must have something of its own.
        Raises ValueError for a layer that stands in two groups, or in none, and for a state that no
        vTensor of max_seq_len tokens has room for.
        """
        given = tuple(groups)
        of_kv = tuple(group for group in given if isinstance(group, KVGroup))
        states = tuple(group for group in given if isinstance(group, StateGroup))
        if not of_kv:
            raise ValueError("a KV cache has at least one group of layers, got none")
        layers = _layers_once("KV", of_kv)
        kept = set(layers) | set(_layers_once("states", states))
        wanted = set() if num_layers is None else set(range(num_layers))
        if num_layers is not None and kept != wanted:
            odd = min(kept ^ wanted)
            what = "is missing from the groups" if odd in wanted else "is not one of the model's"
            raise ValueError(f"layer {odd} {what} of KV; the model has {num_layers} layers")
        first = of_kv[0]
        return cls(
            len(layers),
            first.num_kv_heads,
            first.key_dim,
            first.dtype,
            max_seq_len,
            first.layers_per_plane,
            of_kv,
            tuple(tensor for group in states for tensor in group.tensors),
        )

    def group_of(self, layer: int) -> KVGroup:
        """The group that ``layer`` keeps its KV in. Raises LookupError where it keeps none."""
        for group in self.groups:
            if layer in group.layers:
                return group
        raise LookupError(f"layer {layer} is not one of the layers that keep KV")

    def _uniform(self) -> KVGroup:
        return KVGroup(
            tuple(range(self.num_layers)),
            self.num_kv_heads,
            self.head_dim,
            self.head_dim,
            self.dtype,
            layers_per_plane=self.layers_per_plane,
        )

    def state_bytes(self, chunk_bytes: int) -> int:
        """Physical bytes of the state of one sequence: whole rows of chunks. 0: none is kept."""
        num_rows = -(-self.state.num_tokens * self.plane_token_bytes // chunk_bytes)
        return num_rows * self.row_chunks * chunk_bytes

    def retentions(self) -> tuple[Retention, ...]:
        """What keeps the same tokens, in the order in which it stands in a row: first the layers
        that keep all, then by window."""
        found: list[Retention] = []
        for group in sorted(self.groups, key=lambda group: group.window or 0):
            if not found or found[-1].window != group.window:
                first = found[-1].first_chunk + found[-1].num_chunks if found else 0
                found.append(Retention(group.window, 0, 0, first, 0))
            last = found[-1]
            found[-1] = replace(
                last,
                num_layers=last.num_layers + len(group.layers),
                token_bytes=last.token_bytes + group.bytes_per_token,
                num_chunks=last.num_chunks + group.bytes_per_token // self.plane_token_bytes,
            )
        return tuple(found)

    @property
    def windows(self) -> tuple[int, ...]:
        """The windows of its groups, ascending; none where all keep everything."""
        return tuple(sorted({group.window for group in self.groups if group.window is not None}))

    def core(self) -> _vtensor.KVSpec:
        """The spec as the core's own type, checked. Raises ValueError for sizes that do not fit
        each other, or in 64 bits."""
        core = _vtensor.KVSpec()
        try:
            core.max_seq_len = self.max_seq_len
        except TypeError:
            raise ValueError("max_seq_len does not fit in 64 bits") from None
        core.groups = [group.core() for group in self.groups]
        core.check()
        return core


def _layers_once(what: str, groups: Iterable[KVGroup | StateGroup]) -> list[int]:
    layers = sorted(layer for group in groups for layer in group.layers)
    twice = [layer for layer, other in pairwise(layers) if layer == other]
    if twice:
        raise ValueError(f"layer {twice[0]} stands in the groups of {what} twice")
    return layers
