"""What compressed-tensors (llm-compressor) says of a model in its config.json."""

from __future__ import annotations

from typing import Any, NamedTuple

from flexinfer.checkpoints.parts import Settings, refuse_other
from flexinfer.errors import UnsupportedModelError

METHOD = "compressed-tensors"
DEFAULTS = {"type": "int", "num_bits": 8, "symmetric": True, "strategy": None}
"""What is meant by settings that are not there."""


class Group(NamedTuple):
    """The way in which all quantised layers of a model are."""

    kind: Any
    """Its format, by the name that compressed-tensors has for it."""
    weights: dict[str, Any]
    inputs: dict[str, Any] | None


def only_group(settings: Settings) -> Group:
    """Raises UnsupportedModelError where there are several, and for what is read in no format."""
    groups = _mapping("config_groups", settings.get("config_groups") or {})
    if len(groups) != 1:
        raise UnsupportedModelError(
            f"weights quantised by {METHOD!r} in {len(groups)} ways (config_groups) cannot be read "
            "here, only those in one"
        )
    own = _mapping("config_groups", next(iter(groups.values())))
    if own.get("weights") is None:
        raise UnsupportedModelError(f"{METHOD!r} without quantised weights cannot be read here")
    for name in ("weights", "input_activations"):
        _mapping(name, own.get(name) or {})
    for name in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        refuse_other(settings, METHOD, name, (None, {}))
    refuse_other(own, METHOD, "output_activations", (None,))
    refuse_other(own["weights"], METHOD, "dynamic", (False,))
    kind = own.get("format") or settings.get("format")
    return Group(kind, own["weights"], own.get("input_activations"))


def check_floats(group: Group, bits: int, strategies: tuple[str, ...]) -> None:
    """Refuse by name weights that are no floating-point numbers of so many bits, and inputs that
    are to be anything else than floating-point numbers, too: these stay as they are."""
    refuse_other(group.weights, METHOD, "actorder", (None,))
    for part, sizes in ((group.weights, (bits,)), (group.inputs, (8, 4))):
        if part is None:
            continue
        own = {**DEFAULTS, **part}
        for name, known in (("type", ("float",)), ("num_bits", sizes), ("symmetric", (True,))):
            refuse_other(own, METHOD, name, known)
    refuse_other({**DEFAULTS, **group.weights}, METHOD, "strategy", strategies)


def _mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UnsupportedModelError(
            f"{METHOD!r} with {value!r} in {name} cannot be read here: settings there have names"
        )
    return value
