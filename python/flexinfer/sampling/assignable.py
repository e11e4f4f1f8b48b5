"""Assignable: params whose fields can be changed, and are checked as where they are made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self


class Assignable:
    """Base of dataclasses that set `_is_made` when they have been checked.

    An assignment makes the object anew, so that all checks and what follows from a field are those
    of its making; after an error it is as it was. The engine takes a copy, with which a request
    runs. As for any object that changes, there is no hash.
    """

    _is_made = False

    def __setattr__(self, name: str, value: Any) -> None:
        if not self._is_made:  # each field by the generated __init__, to be checked together
            object.__setattr__(self, name, value)
            return
        declared = self.__dataclass_fields__.get(name)  # type: ignore[attr-defined]
        if declared is None or not declared.init:
            raise AttributeError(
                f"{type(self).__name__} has no field {name!r} that could be assigned"
            )
        changed = replace(self, **{name: value})  # type: ignore[type-var]
        self.__dict__.update(changed.__dict__)

    def clone(self) -> Self:
        """A copy, read anew: what was done to lists within is checked, and seen."""
        return replace(self)  # type: ignore[type-var]
