"""KVSpec: the shape of a model's KV cache and how its layers lie in planes."""

from __future__ import annotations

from dataclasses import dataclass, fields

_ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class KVSpec:
    """Shape of a model's KV cache.

    Attributes:
        dtype: ``"float32"``, ``"float16"``, ``"bfloat16"``, or the torch dtype of that name.
        max_seq_len: tokens that one vTensor can hold.
        layers_per_plane: 1 is the dense layout (K and V of each layer in ranges of their own);
            ``num_layers``, the default, keeps all layers of a token side by side (interleaved).
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "float32"
    max_seq_len: int = 4096
    layers_per_plane: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        if self.dtype not in _ELEMENT_BYTES:
            known = ", ".join(_ELEMENT_BYTES)
            raise ValueError(f"dtype {self.dtype!r} is not supported for KV; choose one of {known}")
        if self.layers_per_plane is None:
            object.__setattr__(self, "layers_per_plane", self.num_layers)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "dtype" and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{field.name} must be an integer of at least 1, got {value!r}")
        if self.num_layers % (self.layers_per_plane or 1):
            raise ValueError(
                f"layers_per_plane {self.layers_per_plane} does not divide num_layers "
                f"{self.num_layers}"
            )

    @property
    def element_bytes(self) -> int:
        """Bytes of one number."""
        return _ELEMENT_BYTES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token: K and V of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.element_bytes

    @property
    def num_planes(self) -> int:
        """Virtual ranges of one vTensor."""
        if self.layers_per_plane == 1:
            return 2 * self.num_layers
        return self.num_layers // (self.layers_per_plane or self.num_layers)

    @property
    def plane_token_bytes(self) -> int:
        """Bytes of one token in one plane."""
        return self.bytes_per_token // self.num_planes
