"""Targets: the layers that an adapter_config.json chooses, as PEFT reads it
(peft/tuners/tuners_utils.py, `check_target_module_exists`). No torch.

    target_modules       names, by the ends of paths; or an expression, for all of a path; or
                         "all-linear": what is linear, but the head
    exclude_modules      names or an expression, too: not these
    layers_to_transform  with names: layers with these numbers alone, behind any name or one that
                         `layers_pattern` has

Without `target_modules` PEFT has a list of its own for each kind of model: any layer may be meant.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

ALL = "all-linear"
FIELDS = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")


class Targets:
    """Paths are those of linear layers, without the head. REQUIRES: expressions that compile."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._said = {field: config[field] for field in FIELDS if config.get(field)}
        self._names: Any = config.get("target_modules")
        is_all = isinstance(self._names, str) and self._names.lower() == ALL
        self._names_layers = self._names is not None and not is_all
        self._excluded = config.get("exclude_modules")
        self._numbers = config.get("layers_to_transform")
        patterns = config.get("layers_pattern") or ()
        self._patterns = [patterns] if isinstance(patterns, str) else patterns

    def __str__(self) -> str:
        """What the config has of it."""
        return ", ".join(f"{field}={value!r}" for field, value in self._said.items())

    def __contains__(self, path: str) -> bool:
        """Whether an adapter may have weights for it."""
        if self._excluded and _is_named(path, self._excluded):
            return False
        return not self._names_layers or (_is_named(path, self._names) and self._has_number(path))

    def requires(self, path: str) -> bool:
        """Whether it is incomplete without."""
        return self._names_layers and path in self

    def _has_number(self, path: str) -> bool:
        names, numbers = self._names, self._numbers
        if isinstance(names, str) or path in names or numbers in (None, []):
            return True
        for pattern in self._patterns or [r"[^.]*"]:
            found = re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", path)
            if found is not None:
                return int(found[1]) in (numbers if isinstance(numbers, list) else [numbers])
        return False


def _is_named(path: str, names: Any) -> bool:
    """Whether an expression is all of the path, or one of these names its end."""
    if isinstance(names, str):
        return re.fullmatch(names, path) is not None
    return isinstance(names, list) and any(f".{path}".endswith(f".{name}") for name in names)
