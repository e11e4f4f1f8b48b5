"""KVSpec: the shape of a model's KV cache and how its layers lie in planes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from flexinfer import _vtensor

_ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class KVSpec:
    """Shape of a model's KV cache.

    Attributes:
        dtype: ``"float32"``, ``"float16"``, ``"bfloat16"``, or the torch dtype of that name.
        max_seq_len: tokens that one vTensor can hold.
        layers_per_plane: 1 is the dense layout (K and V of each layer in ranges of their own);
            ``num_layers``, the default, keeps all layers of a token side by side (interleaved).
        element_bytes: bytes of one number.
        bytes_per_token: bytes of one token: K and V of all layers.
        num_planes: virtual ranges of one vTensor.
        plane_token_bytes: bytes of one token in one plane.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "float32"
    max_seq_len: int = 4096
    layers_per_plane: int | None = None

    element_bytes: int = field(init=False, repr=False, compare=False)
    bytes_per_token: int = field(init=False, repr=False, compare=False)
    num_planes: int = field(init=False, repr=False, compare=False)
    plane_token_bytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._set(dtype=str(self.dtype).removeprefix("torch."))
        if self.dtype not in _ELEMENT_BYTES:
            known = ", ".join(_ELEMENT_BYTES)
            raise ValueError(f"dtype {self.dtype!r} is not supported for KV; choose one of {known}")
        if self.layers_per_plane is None:
            self._set(layers_per_plane=self.num_layers)
        for given in fields(self):
            value = getattr(self, given.name) if given.init else 1
            if given.name != "dtype" and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{given.name} must be an integer of at least 1, got {value!r}")
        self._set(element_bytes=_ELEMENT_BYTES[self.dtype])
        core = self.core()
        self._set(
            bytes_per_token=core.bytes_per_token(),
            num_planes=core.num_planes(),
            plane_token_bytes=core.token_bytes(),
        )

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def core(self) -> _vtensor.KVSpec:
        """The spec as the core's own type, checked. Raises ValueError for sizes that do not fit
        each other, or in 64 bits."""
        core = _vtensor.KVSpec()
        for given in fields(self):
            if hasattr(core, given.name) and (given.init or given.name == "element_bytes"):
                try:
                    setattr(core, given.name, getattr(self, given.name))
                except TypeError:
                    raise ValueError(f"{given.name} does not fit in 64 bits") from None
        core.check()
        return core
