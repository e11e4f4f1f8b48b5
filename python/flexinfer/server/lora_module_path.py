"""LoRAModulePath: an adapter that a server has from its start, as vLLM names it. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoRAModulePath:
    """LoRAModulePath("sql", "adapters/sql")"""

    name: str
    """The model that requests choose."""
    path: str
    """A folder that PEFT has saved."""
    base_model_name: str | None = None
    """Which name of the model is said to be its parent; None, or a name that the model has not: the
    first."""

    def __post_init__(self) -> None:
        for name in ("name", "path"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ValueError(f"{name} must be a string that is not empty, got {value!r}")
        base = self.base_model_name
        if base is not None and not isinstance(base, str):
            raise ValueError(f"base_model_name must be a string, got {base!r}")
