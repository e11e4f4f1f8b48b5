"""Roles: whether an engine prefills for others, decodes what others have prefilled, or does both
for itself; and what does not go with the first two."""

from __future__ import annotations

from typing import Any

ROLES = ("both", "prefill", "decode")


def check_role(config: Any) -> None:
    """config: an `EngineConfig`. Raises ValueError for what its role does not go with."""
    role = config.role
    if role not in ROLES:
        raise ValueError(f"role must be one of {', '.join(map(repr, ROLES))}, got {role!r}")
    if role == "both":
        return
    if not config.enable_prefix_caching:
        raise ValueError(
            f"role {role!r} needs enable_prefix_caching: what is handed over is a recorded prefix"
        )
    if config.tensor_parallel_size > 1:
        raise ValueError(
            f"role {role!r} does not go with tensor_parallel_size > 1: each rank would have to "
            "hand over its own heads"
        )
    if role == "prefill":
        for name, reason in (
            ("speculative_config", "nothing is decoded there"),
            ("enable_lora", "prompts for an adapter are computed where they are decoded"),
        ):
            if getattr(config, name):
                raise ValueError(f"{name} does not go with role 'prefill': {reason}")


def check_device(role: str, device: str | None) -> None:
    """Raises ValueError where engines do not hand over that device's memory. None: not known yet,
    since a loaded model brings its own."""
    if role != "both" and device is not None and not device.startswith("cpu"):
        raise ValueError(
            f"role {role!r} does not go with device {device!r}: engines hand over memory of "
            "the CPU only so far, though a VTensorManager hands over a GPU's too"
        )
