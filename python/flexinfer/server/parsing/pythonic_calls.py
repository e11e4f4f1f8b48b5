"""Calls written as a Python list: [weather(city="Rome"), clock()]; the whole text is one."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection
from typing import Any

from flexinfer.server.parsing.pieces import CallArguments, CallStart, Content, Piece

TAGS = re.compile(r"<\|python_(?:start|end)\|>")
CONSTANTS = {"true": True, "false": False, "null": None}


class PythonicCalls:
    """A text that begins with "[" is read at its end: only then is it known to be calls."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""
        self._is_text = False

    def feed(self, text: str) -> list[Piece]:
        self._held += text
        start = self._held.lstrip()
        if not self._is_text and (not start or start[0] in "[<"):
            return []
        self._is_text = True
        held, self._held = self._held, ""
        return [Content(held)] if held else []

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        try:
            calls = _calls(TAGS.sub("", held).strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            calls = []
        if not calls or any(name not in self._names for name, _ in calls):
            return [Content(held)] if held else []
        return [
            piece
            for name, arguments in calls
            for piece in (CallStart(name), CallArguments(json.dumps(arguments, ensure_ascii=False)))
        ]


def _calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Raises ValueError or SyntaxError for what is not a list of calls."""
    body = ast.parse(text, mode="eval").body
    if not isinstance(body, ast.List):
        raise ValueError("no list")
    return [_call(one) for one in body.elts]


def _call(node: ast.expr) -> tuple[str, dict[str, Any]]:
    if not isinstance(node, ast.Call) or node.args or any(k.arg is None for k in node.keywords):
        raise ValueError("no call by keywords")
    arguments = {str(keyword.arg): _value(keyword.value) for keyword in node.keywords}
    json.dumps(arguments, allow_nan=False)
    return ast.unparse(node.func), arguments


def _value(node: ast.expr) -> Any:
    """A literal, in which JSON's constants count too."""
    if isinstance(node, ast.Name) and node.id in CONSTANTS:
        return CONSTANTS[node.id]
    if isinstance(node, ast.List):
        return [_value(one) for one in node.elts]
    if isinstance(node, ast.Dict) and all(key is not None for key in node.keys):
        keys = [ast.literal_eval(key) for key in node.keys if key is not None]
        return dict(zip(keys, map(_value, node.values), strict=True))
    return ast.literal_eval(node)
