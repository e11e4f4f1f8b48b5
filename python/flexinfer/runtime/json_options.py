"""Options that are a mapping or its JSON, such as `speculative_config`, as a frozen dataclass."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeVar

T = TypeVar("T")


def read_mapping(option: str, given: Any) -> Mapping[str, Any]:
    """A mapping, or what its JSON says. Raises ValueError, naming the option, for anything else."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ValueError(f"{option} is no JSON: {error}") from None
    if not isinstance(given, Mapping):
        raise ValueError(f"{option} must be a mapping (a JSON object), got {given!r}")
    return given


def require_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raises ValueError for any other value."""
    if value not in choices:
        known = ", ".join(map(repr, choices))
        raise ValueError(f"{name} must be one of {known}, got {value!r}")


def from_mapping(cls: type[T], option: str, given: Any, **choices: Sequence[str]) -> T:
    """`choices`: of fields on which it depends what others there must be, so that they are looked
    at first. Raises ValueError, naming the option and what is wrong with it."""
    if isinstance(given, cls):
        return given
    given = read_mapping(option, given)
    known = fields(cls)  # type: ignore[arg-type]
    names = [item.name for item in known]
    unknown = sorted(map(str, given.keys() - set(names)))
    if unknown:
        raise ValueError(
            f"{option} has {', '.join(unknown)}, which is not supported; "
            f"it may have {', '.join(names)}"
        )
    for name in choices.keys() & given.keys():
        require_choice(f"{option}: {name}", given[name], choices[name])
    missing = [item.name for item in known if item.default is MISSING and item.name not in given]
    if missing:
        raise ValueError(f"{option} needs {' and '.join(missing)}")
    return cls(**given)
