"""KVSpec: the shape of a model's KV cache and how its layers lie in planes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise

from flexinfer import _vtensor

_ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1}
_MAX_LAYERS = 1 << 16


def _dtype_name(dtype: object) -> str:
    """``"float32"`` of itself or of the torch dtype. Raises ValueError for what KV cannot be."""
    name = str(dtype).removeprefix("torch.")
    if name not in _ELEMENT_BYTES:
        known = ", ".join(_ELEMENT_BYTES)
        raise ValueError(f"dtype {name!r} is not supported for KV; choose one of {known}")
    return name


def _check_int(name: str, value: object, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


@dataclass(frozen=True)
class KVGroup:
    """Layers that keep KV in one shape.

    Attributes:
        layers: indices of the model's layers that own KV in this group.
        key_dim: width of a key per head.
        value_dim: width of a value per head; 0: keys alone are kept, as a latent (MLA).
        dtype: ``"float32"``, ``"float16"``, ``"bfloat16"``, or the torch dtype of that name;
            ``"uint8"``: rows of bytes, whose widths count whatever stands in them, as quantised KV
            with its scales.
        window: tokens that a query reads, its own and those before it; what lies behind them is
            given back to the pool. None: a query reads all.
        layers_per_plane: as in :class:`KVSpec`; None: all layers of the group.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: str = "float32"
    window: int | None = None
    layers_per_plane: int | None = None

    def __post_init__(self) -> None:
        _set(self, layers=tuple(self.layers), dtype=_dtype_name(self.dtype))
        if not self.layers:
            raise ValueError("a group of KV has at least one layer, got none")
        for layer in self.layers:
            _check_int("a layer", layer, 0)
        _check_int("num_kv_heads", self.num_kv_heads)
        _check_int("key_dim", self.key_dim)
        _check_int("value_dim", self.value_dim, 0)
        if self.window is not None:
            _check_int("window", self.window)
        if self.layers_per_plane is None:
            _set(self, layers_per_plane=len(self.layers))
        _check_int("layers_per_plane", self.layers_per_plane)

    @property
    def element_bytes(self) -> int:
        """Bytes of one number."""
        return _ELEMENT_BYTES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """K and V of its layers."""
        widths = self.num_kv_heads * (self.key_dim + self.value_dim)
        return len(self.layers) * widths * self.element_bytes

    def core(self) -> _vtensor.KVGroup:
        """The group as the core's own type. Raises ValueError for what does not fit in 64 bits."""
        core = _vtensor.KVGroup()
        for name in (*(given.name for given in fields(self)), "element_bytes"):
            if hasattr(core, name):
                try:
                    setattr(core, name, getattr(self, name) or 0)
                except TypeError:
                    raise ValueError(f"{name} does not fit in 64 bits") from None
        return core


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
        element_bytes: bytes of one number.
        bytes_per_token: bytes of one token: K and V of all layers.
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

    groups: tuple[KVGroup, ...] = field(init=False, repr=False, compare=False)
    element_bytes: int = field(init=False, repr=False, compare=False)
    bytes_per_token: int = field(init=False, repr=False, compare=False)
    num_planes: int = field(init=False, repr=False, compare=False)
    row_chunks: int = field(init=False, repr=False, compare=False)
    plane_token_bytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _set(self, dtype=_dtype_name(self.dtype))
        if self.layers_per_plane is None:
            _set(self, layers_per_plane=self.num_layers)
        for given in fields(self):
            if given.init and given.name not in ("dtype", "mixed"):
                _check_int(given.name, getattr(self, given.name))
        if self.num_layers > _MAX_LAYERS:
            raise ValueError(f"num_layers {self.num_layers} overflows: at most {_MAX_LAYERS}")
        _set(self, groups=self.mixed or (self._uniform(),))
        core = self.core()
        _set(
            self,
            element_bytes=_ELEMENT_BYTES[self.dtype],
            bytes_per_token=core.bytes_per_token(),
            num_planes=core.num_planes(),
            row_chunks=core.row_chunks(),
            plane_token_bytes=core.token_bytes(),
        )

    @classmethod
    def of_groups(
        cls, groups: Iterable[KVGroup], max_seq_len: int = 4096, num_layers: int | None = None
    ) -> KVSpec:
        """A cache whose layers differ: each layer that keeps KV stands in one group.

        ``num_layers``: how many layers there are, if each of them must have KV of its own.
        Raises ValueError for a layer that stands in two groups, or in none.
        """
        groups = tuple(groups)
        if not groups:
            raise ValueError("a KV cache has at least one group of layers, got none")
        layers = sorted(layer for group in groups for layer in group.layers)
        twice = [layer for layer, other in pairwise(layers) if layer == other]
        if twice:
            raise ValueError(f"layer {twice[0]} stands in the groups of KV twice")
        wanted = set() if num_layers is None else set(range(num_layers))
        if num_layers is not None and set(layers) != wanted:
            odd = min(set(layers) ^ wanted)
            what = "is missing from the groups" if odd in wanted else "is not one of the model's"
            raise ValueError(f"layer {odd} {what} of KV; the model has {num_layers} layers")
        first = groups[0]
        return cls(
            len(layers),
            first.num_kv_heads,
            first.key_dim,
            first.dtype,
            max_seq_len,
            first.layers_per_plane,
            groups,
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


def _set(target: object, **values: object) -> None:
    for name, value in values.items():
        object.__setattr__(target, name, value)
