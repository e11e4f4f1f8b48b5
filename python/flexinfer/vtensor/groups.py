"""KVGroup: layers that keep KV in one shape, and for how many tokens."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from flexinfer import _vtensor

ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1}


def dtype_name(dtype: object) -> str:
    """``"float32"`` of itself or of the torch dtype. Raises ValueError for what KV cannot be."""
    name = str(dtype).removeprefix("torch.")
    if name not in ELEMENT_BYTES:
        known = ", ".join(ELEMENT_BYTES)
        raise ValueError(f"dtype {name!r} is not supported for KV; choose one of {known}")
    return name


def check_int(name: str, value: object, least: int = 1) -> None:
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
        layers_per_plane: as in :class:`KVSpec`; None: all layers of the group. Where there is a
            window the layers need not be a multiple of it: the last plane has room for more then.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: str = "float32"
    window: int | None = None
    layers_per_plane: int | None = None

    def __post_init__(self) -> None:
        set_fields(self, layers=tuple(self.layers), dtype=dtype_name(self.dtype))
        if not self.layers:
            raise ValueError("a group of KV has at least one layer, got none")
        for layer in self.layers:
            check_int("a layer", layer, 0)
        check_int("num_kv_heads", self.num_kv_heads)
        check_int("key_dim", self.key_dim)
        check_int("value_dim", self.value_dim, 0)
        if self.window is not None:
            check_int("window", self.window)
        if self.layers_per_plane is None:
            set_fields(self, layers_per_plane=len(self.layers))
        check_int("layers_per_plane", self.layers_per_plane)

    @property
    def retention(self) -> Literal["full", "window"]:
        """What is kept of a sequence: all of its tokens, or the last ones."""
        return "full" if self.window is None else "window"

    @property
    def element_bytes(self) -> int:
        """Bytes of one number."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def layer_bytes(self) -> int:
        """K and V of one token in one layer."""
        return self.num_kv_heads * (self.key_dim + self.value_dim) * self.element_bytes

    @property
    def bytes_per_token(self) -> int:
        """K and V of its layers, and what the last plane has room for beside them."""
        per_plane = self.layers_per_plane or len(self.layers)
        return -(-len(self.layers) // per_plane) * per_plane * self.layer_bytes

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


def set_fields(target: object, **values: object) -> None:
    """Of a frozen dataclass, in its ``__post_init__``."""
    for name, value in values.items():
        object.__setattr__(target, name, value)
