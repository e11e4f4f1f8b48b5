"""Targets: the layers that an adapter_config.json chooses, as PEFT reads it
(peft/tuners/tuners_utils.py, `check_target_module_exists`). No torch.

    target_modules       names, by the ends of paths; or an expression, for all of a path; or
                         "all-linear": what is linear, but the head
    exclude_modules      names or an expression, too: not these
    layers_to_transform  with names: layers with these numbers alone, behind any name or one that
                         `layers_pattern` has

Without `target_modules` PEFT has a list of its own for each kind of model: any layer may be meant.
With "all-linear" it has a rule of its own, too, and what has no weights adds nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flexinfer.lora.expressions import Expressions

ALL = "all-linear"
FIELDS = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")


ANY_LAYER = re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")
"""In the place of `layers_pattern`, where there is none."""


class Targets:
    """Paths are those of linear layers, without the head."""

    def __init__(self, config: Mapping[str, Any], expressions: Expressions) -> None:
        """expressions: of this config, matched with the paths that will be asked for."""
        self._said = {field: config[field] for field in FIELDS if config.get(field)}
        self._expressions = expressions
        self._names: Any = config.get("target_modules")
        is_all = isinstance(self._names, str) and self._names.lower() == ALL
        self._names_layers = self._names is not None and not is_all
        self._numbers = config.get("layers_to_transform")
        patterns = config.get("layers_pattern") or ()
        self._patterns = [patterns] if isinstance(patterns, str) else patterns

    def __str__(self) -> str:
        """What the config has of it."""
        return ", ".join(f"{field}={value!r}" for field, value in self._said.items())

    def __contains__(self, path: str) -> bool:
        """Whether an adapter may have weights for it."""
        if self._is_named("exclude_modules", path):
            return False
        if not self._names_layers:
            return True
        return self._is_named("target_modules", path) and self._has_number(path)

    def requires(self, path: str) -> bool:
        """Whether it is incomplete without."""
        return self._names_layers and path in self

    def _is_named(self, field: str, path: str) -> bool:
        """Whether an expression is all of the path, or one of these names its end."""
        names = self._said.get(field)
        if isinstance(names, str):
            return path in self._expressions.found(field, names)
        return isinstance(names, list) and any(f".{path}".endswith(f".{name}") for name in names)

    def _has_number(self, path: str) -> bool:
        names, numbers = self._names, self._numbers
        if isinstance(names, str) or path in names or numbers in (None, []):
            return True
        number = self._number_of(path)
        return number is not None and int(number) in (
            numbers if isinstance(numbers, list) else [numbers]
        )

    def _number_of(self, path: str) -> str | None:
        """By the first pattern that matches, even if that one says none."""
        if not self._patterns:
            found = ANY_LAYER.match(path)
            return found and found["idx"]
        for pattern in self._patterns:
            matched = self._expressions.found("layers_pattern", pattern)
            if path in matched:
                return matched[path]
        return None
