"""Calls whose arguments stand in tags, one tag for each: Qwen3-Coder's way, GLM's, MiniMax's.

A parameter becomes JSON when its closing tag has come; its type is that of the function's schema.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flexinfer.server.parsing.pieces import CallArguments, CallStart, Piece, overlap
from flexinfer.server.parsing.stepwise import Stepwise

Schemas = Mapping[str, Mapping[str, Any]]
"""Name of a function -> the JSON schema of its parameters."""


@dataclass(frozen=True)
class XmlForm:
    begins: tuple[str, ...]
    """What a call may begin with; what comes before it is text."""
    opening: re.Pattern[str]
    """The whole opening, with the function's name as its group."""
    parameter: re.Pattern[str]
    """Name and value."""
    parameter_begin: str
    close: str
    """The end of one call."""
    end: str = ""
    """What may follow it."""


class XmlCalls(Stepwise):
    def __init__(self, form: XmlForm, schemas: Schemas) -> None:
        super().__init__(self._text)
        self._form = form
        self._schemas = schemas
        self._name = ""
        self._num_parameters = 0

    def finish(self) -> list[Piece]:
        """A call that is cut off within a parameter stays so: its arguments are no JSON."""
        pieces: list[Piece] = []
        if self._step == self._parameters and self._form.parameter_begin not in self._held:
            pieces.append(CallArguments("}"))
        elif self._step in (self._text, self._open):
            self._say(self._framing + self._held, pieces)
        self._held = ""
        return pieces

    def _text(self, pieces: list[Piece]) -> bool:
        if self._is_after_call and not self._has_content:
            self._held = self._held.lstrip()
        places = [place for one in self._form.begins if (place := self._held.find(one)) >= 0]
        if places:
            self._enter(min(places), 0, pieces)
            self._step = self._open
            return True
        num_free = len(self._held) - max(overlap(self._held, one) for one in self._form.begins)
        if self._has_content or self._held[:num_free].strip():
            self._say(self._held[:num_free], pieces)
            self._held = self._held[num_free:]
        return False

    def _open(self, pieces: list[Piece]) -> bool:
        found = self._form.opening.match(self._held)
        if found and found[1] in self._schemas:
            self._held, self._framing = self._held[found.end() :], ""
            self._name = found[1]
            self._num_parameters = 0
            pieces += [CallStart(self._name), CallArguments("{")]
            self._step = self._parameters
            return True
        last = self._held.find(self._form.close)
        if found or last >= 0:  # no call of a known function
            end = found.end() if found else last + len(self._form.close)
            self._say(self._framing + self._held[:end], pieces)
            self._held, self._framing = self._held[end:], ""
            self._is_after_call = False
            self._step = self._text
            return True
        return False

    def _parameters(self, pieces: list[Piece]) -> bool:
        begin = self._held.find(self._form.parameter_begin)
        close = self._held.find(self._form.close)
        if begin >= 0 and (close < 0 or begin < close):
            found = self._form.parameter.match(self._held, begin)
            if found is None:
                return False
            comma = ", " if self._num_parameters else ""
            self._num_parameters += 1
            value = _value(found[2], self._types(found[1]))
            text = f"{json.dumps(found[1])}: {json.dumps(value, ensure_ascii=False)}"
            pieces.append(CallArguments(comma + text))
            self._held = self._held[found.end() :]
            return True
        if close < 0:
            return False
        pieces.append(CallArguments("}"))
        self._held = self._held[close + len(self._form.close) :]
        self._has_content = False
        self._is_after_call = True
        self._step = self._after
        return True

    def _after(self, pieces: list[Piece]) -> bool:
        end = self._form.end
        self._held = self._held.lstrip()
        if end and end.startswith(self._held) and self._held != end:
            return False
        self._held = self._held.removeprefix(end)
        self._step = self._text
        return True

    def _types(self, parameter: str) -> set[str]:
        """Of JSON; none if the schema does not say."""
        properties = self._schemas[self._name].get("properties")
        schema = properties.get(parameter) if isinstance(properties, dict) else None
        if not isinstance(schema, dict):
            return set()
        options = schema.get("anyOf")
        kinds: set[str] = set()
        for one in [schema, *(options if isinstance(options, list) else ())]:
            kind = one.get("type") if isinstance(one, dict) else None
            given = kind if isinstance(kind, list) else [kind]
            kinds |= {name for name in given if isinstance(name, str)}
        return kinds


def _value(text: str, types: set[str]) -> Any:
    """The value that the model wrote, or the text itself where it is none of the type."""
    text = text.removeprefix("\n").removesuffix("\n")
    if not types or types == {"string"}:
        return text
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if "string" in types and not _is_one_of(value, types):
            return text
        return value if _is_json(value) else text
    return text


def _is_one_of(value: Any, types: set[str]) -> bool:
    names = {type(None): "null", bool: "boolean", int: "integer", list: "array", dict: "object"}
    name = names.get(type(value), "number")
    return name in types or (name == "integer" and "number" in types)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError):
        return False
    return True
