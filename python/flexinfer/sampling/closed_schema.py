"""closed_schema: a JSON schema whose objects have no properties but those that it speaks of.

A model that may add properties invents them. So, as with `unevaluatedProperties: false` at each
value (and as xgrammar has it for vLLM), an object is shut that some part of its schema describes:
its own `properties`, a branch of allOf, anyOf or oneOf, or what a $ref leads to. All these parts
are about one object, so that shutting each by itself would leave allOf nothing:

    allOf, $ref   stay open, and the schema that holds them is shut around the names of all
    anyOf, oneOf  each branch is shut around its own names and those beside it

A schema is taken at its word where it says additionalProperties itself, and stays open where it
describes nothing, as {"type": "object"} does. The caller's schema is not changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

MAX_ADDED_BYTES = 1 << 20
"""Of names that are repeated to keep other ones out: branches times names may be many."""
TOO_MANY = (
    "allOf, anyOf, oneOf and $ref bring too many properties together to keep others out: say "
    "additionalProperties there"
)
WHOLE = re.compile(r"#(/(\$defs|definitions)/[^/]+)*")
"""References to what is a schema of a value by itself, and shut where it stands."""
OPEN_NAME = "flexinfer-open-"
"""How definitions are called that are as such a schema, but for its being shut."""
BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
ITEMS = ("prefixItems", "items")
OF_VALUES = (
    "additionalProperties",
    "unevaluatedProperties",
    "items",
    "additionalItems",
    "unevaluatedItems",
    "contains",
)
CHOICES = ("anyOf", "oneOf")
IN_PLACE = ("allOf", *CHOICES, "if", "then", "else", "dependentSchemas", "$ref")


def closed_schema(schema: Any) -> Any:
    """Raises ValueError for a schema that cannot be closed within limits. One whose parts are
    told by $id or $anchor stays as it is."""
    try:
        return _Closing(schema).document()
    except _NotFoundError:
        return schema
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


class _NotFoundError(Exception):
    """A reference leads where it cannot be followed."""


@dataclass
class _Spoken:
    """What parts of a schema say of one object."""

    names: dict[str, None] = field(default_factory=dict)
    """As a set, in the schema's order."""
    patterns: dict[str, None] = field(default_factory=dict)
    describes: bool = False
    is_open: bool = False
    """Others are spoken of, too."""

    def add(self, other: _Spoken) -> None:
        self.names |= other.names
        self.patterns |= other.patterns
        self.describes |= other.describes
        self.is_open |= other.is_open


class _Closing:
    """One document's."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._room_bytes = MAX_ADDED_BYTES
        self._spoken: dict[str, _Spoken] = {}
        self._open_names: dict[str, str] = {}
        self._pending: list[str] = []

    def document(self) -> Any:
        """The whole."""
        out = self._closed(self._schema)
        opened: dict[str, Any] = {}
        while self._pending:
            pointer = self._pending.pop()
            opened[self._open_names[pointer]] = self._opened(self._found(pointer))
        if opened and isinstance(out.get("$defs", {}), dict):
            out["$defs"] = {**out.get("$defs", {}), **opened}
        return out

    def _closed(self, schema: Any, beside: _Spoken | None = None) -> Any:
        """The schema of a value, or a choice `beside` which there are other parts."""
        if schema is True and beside is not None:
            schema = {}
        if not isinstance(schema, dict) or _is_no_object(schema) or _is_reference(schema, beside):
            return self._parts(schema, None)
        said = self._own(schema)
        self._join(said, beside, *self._others(schema, choices=False))
        is_open = said.is_open or "additionalProperties" in schema
        choices = [key for key in CHOICES if isinstance(schema.get(key), list)]
        if len(choices) == 1 and not is_open:
            out: dict[str, Any] = self._parts(schema, self._opened)
            around = said if said.describes else None
            out[choices[0]] = [self._closed(one, around) for one in schema[choices[0]]]
            return out
        self._join(said, *self._others(schema, choices=True))
        out = self._parts(schema, self._opened)
        if is_open or said.is_open or not (said.describes or _says_no_others(schema)):
            return out
        least = schema.get("minProperties", 0)
        if isinstance(least, int) and least > len(said.names) and not said.patterns:
            return out
        return self._shut(out, said)

    def _opened(self, schema: Any) -> Any:
        """The same as one part of several, which others are shut around."""
        if isinstance(schema, dict) and _says_no_others(schema):
            return self._closed(schema)
        return self._parts(schema, self._opened)

    def _parts(self, schema: Any, in_place: Callable[[Any], Any] | None) -> Any:
        """With closed schemas of all values within. `in_place`: of parts about the same object."""
        if not isinstance(schema, dict):
            return schema
        if schema is not self._schema and isinstance(schema.get("$id"), str):
            raise _NotFoundError
        out = {}
        for key, value in schema.items():
            name = key
            if key in BY_NAME and isinstance(value, dict):
                value = {one: self._closed(part) for one, part in value.items()}
            elif key in ITEMS and isinstance(value, list):
                value = [self._closed(part) for part in value]
            elif key == "unevaluatedProperties" and isinstance(value, bool):
                continue  # what is shut says it, and what is open need not
            elif key in OF_VALUES:
                is_alone = "additionalProperties" not in schema and not schema.keys() & {*IN_PLACE}
                if key == "unevaluatedProperties" and is_alone:
                    name = "additionalProperties"
                value = self._closed(value)
            elif key in ("allOf", *CHOICES) and isinstance(value, list):
                value = [(in_place or self._closed)(part) for part in value]
            elif key == "$ref" and isinstance(value, str) and in_place is not None:
                value = self._open_reference(value)
            out[name] = value
        return _without_more_items(out)

    def _open_reference(self, pointer: str) -> str:
        said = self._of_reference(pointer)
        if not (said.describes or said.is_open):
            return pointer
        if pointer not in self._open_names:
            self._open_names[pointer] = f"{OPEN_NAME}{len(self._open_names)}"
            self._pending.append(pointer)
        return f"#/$defs/{self._open_names[pointer]}"

    def _shut(self, schema: dict[str, Any], said: _Spoken) -> dict[str, Any]:
        for key, names in (("properties", said.names), ("patternProperties", said.patterns)):
            own = schema.get(key, {})
            added = {name: True for name in names if name not in own}
            self._spend(sum(len(name) + 8 for name in added))
            if added:
                schema[key] = {**own, **added}
        schema["additionalProperties"] = False
        return schema

    # What is said.

    def _all(self, schema: Any) -> _Spoken:
        """Of one object, by all parts."""
        said = self._own(schema)
        if isinstance(schema, dict):
            self._join(said, *self._others(schema, choices=False))
            self._join(said, *self._others(schema, choices=True))
        return said

    def _own(self, schema: Any) -> _Spoken:
        """By this part alone."""
        said = _Spoken()
        if not isinstance(schema, dict):
            return said
        names, patterns = schema.get("properties"), schema.get("patternProperties")
        if isinstance(names, dict):
            said.names, said.describes = dict.fromkeys(names), True
        if isinstance(patterns, dict):
            said.patterns, said.describes = dict.fromkeys(patterns), True
        required = schema.get("required")
        if isinstance(required, list):
            said.names |= dict.fromkeys(name for name in required if isinstance(name, str))
        said.is_open = "propertyNames" in schema or any(
            schema.get(key, False) is not False
            for key in ("additionalProperties", "unevaluatedProperties")
        )
        return said

    def _others(self, schema: dict[str, Any], *, choices: bool) -> list[_Spoken]:
        """By the parts within: of anyOf and oneOf, or all others."""
        lists = CHOICES if choices else ("allOf",)
        parts = [one for key in lists for one in _as_list(schema.get(key))]
        if choices:
            return [self._all(part) for part in parts]
        parts += [schema[key] for key in ("if", "then", "else") if key in schema]
        if isinstance(schema.get("dependentSchemas"), dict):
            parts += schema["dependentSchemas"].values()
        said = [self._all(part) for part in parts]
        if isinstance(schema.get("$ref"), str):
            said.append(self._of_reference(schema["$ref"]))
        return said

    def _of_reference(self, pointer: str) -> _Spoken:
        said = self._spoken.get(pointer)
        if said is None:
            self._spoken[pointer] = _Spoken()  # for one that leads back to itself
            said = self._spoken[pointer] = self._all(self._found(pointer))
        return said

    def _join(self, said: _Spoken, *others: _Spoken | None) -> None:
        for other in others:
            if other is not None:
                self._spend(8 * (len(other.names) + len(other.patterns)))
                said.add(other)

    def _spend(self, num_bytes: int) -> None:
        self._room_bytes -= num_bytes
        if self._room_bytes < 0:
            raise ValueError(TOO_MANY)

    def _found(self, pointer: str) -> Any:
        """What a JSON pointer leads to. Raises _NotFoundError."""
        first, *steps = pointer.split("/")
        found = self._schema
        try:
            for step in steps:
                key = unquote(step).replace("~1", "/").replace("~0", "~")
                found = found[int(key)] if isinstance(found, list) else found[key]
        except (LookupError, TypeError, ValueError):
            raise _NotFoundError from None
        if first != "#":
            raise _NotFoundError
        return found


def _is_no_object(schema: Mapping[str, Any]) -> bool:
    kinds = schema.get("type")
    return isinstance(kinds, (str, list)) and "object" not in _as_list(kinds)


def _is_reference(schema: Mapping[str, Any], beside: _Spoken | None) -> bool:
    """Whether it is no more than one to a schema that is shut itself."""
    to = schema.get("$ref")
    if beside is not None or not isinstance(to, str):
        return False
    if to.startswith("#/") and not WHOLE.fullmatch(to):
        return False
    says = {"properties", "patternProperties", "required", *OF_VALUES[:2], *IN_PLACE}
    return schema.keys() & says == {"$ref"}


def _says_no_others(schema: Mapping[str, Any]) -> bool:
    return schema.get("unevaluatedProperties") is False


def _without_more_items(schema: dict[str, Any]) -> dict[str, Any]:
    """An array has no items but those that are listed, either."""
    says = {"unevaluatedItems", "minItems", *IN_PLACE}
    if schema.keys() & says:
        return schema
    if isinstance(schema.get("items"), list):
        schema.setdefault("additionalItems", False)
    elif isinstance(schema.get("prefixItems"), list):
        schema.setdefault("items", False)
    return schema


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
