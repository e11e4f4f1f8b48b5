"""Tool calls: what forces the model to make one, and finding them in its text.

auto               free text; <tool_call>{"name": ..., "arguments": {...}}</tool_call> is a call
required           constrained to a JSON list of calls, at least one
a named function   constrained to the JSON of its arguments
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flexinfer.outputs import CompletionOutput
from flexinfer.sampling.grammars import StructuredOutputsParams
from flexinfer.server.http.errors import bad_request
from flexinfer.server.observability.logs import new_id
from flexinfer.server.protocol.chat import (
    FunctionCall,
    NamedToolChoice,
    Tool,
    ToolCall,
    ToolChoice,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class Parsed:
    """What a piece of text turned out to be."""

    content: str = ""
    calls: tuple[ToolCall, ...] = ()


class ToolParser(Protocol):
    """Reads one choice's text piece by piece."""

    def feed(self, text: str) -> Parsed: ...
    def finish(self) -> Parsed:
        """What was held back, at the end of the text."""
        ...


@dataclass(frozen=True)
class ToolUse:
    """What the fields `tools`, `tool_choice` and `parallel_tool_calls` come to."""

    tools: tuple[Tool, ...] = ()
    forced: str | None = None
    """The function that must be called."""
    required: bool = False
    parallel: bool = True

    @property
    def structure(self) -> StructuredOutputsParams | None:
        """What forces the call."""
        if self.forced is not None:
            return _json(_parameters(self._tool(self.forced)))
        if not self.required:
            return None
        schemas = {tool.function.name: _parameters(tool) for tool in self.tools}
        calls = {
            "type": "array",
            "items": {"anyOf": [_call_schema(name) for name in schemas]},
            "minItems": 1,
            "$defs": {name: _moved(schema, f"#/$defs/{name}") for name, schema in schemas.items()},
        }
        return _json(calls if self.parallel else calls | {"maxItems": 1})

    def parser(self) -> ToolParser | None:
        """Of one choice; None: the text is the content."""
        if self.forced is not None:
            return ForcedParser(self.forced)
        if self.required:
            return RequiredParser()
        return HermesParser({t.function.name for t in self.tools}) if self.tools else None

    def _tool(self, name: str) -> Tool:
        return next(tool for tool in self.tools if tool.function.name == name)


def tool_use(
    tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None
) -> ToolUse:
    """Raises APIError for a choice without tools, or of one that is not there."""
    if not tools:
        if choice not in (None, "none"):
            raise bad_request("tool_choice is only allowed with tools", "tool_choice")
        return ToolUse()
    if choice == "none":
        return ToolUse()
    given = tuple(tools)
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        if name not in {tool.function.name for tool in given}:
            raise bad_request(f"tool_choice names {name!r}, which is not in tools", "tool_choice")
        return ToolUse(given, forced=name)
    return ToolUse(given, required=choice == "required", parallel=parallel is not False)


class HermesParser:
    """Text with calls in it, each between <tool_call> and </tool_call>.

    What cannot be read as a call of a known function is text.
    """

    def __init__(self, names: set[str]) -> None:
        self._names = names
        self._held = ""
        self._skips_newline = False  # one that only parts a call from what follows it

    def feed(self, text: str) -> Parsed:
        self._held += text
        content = ""
        calls: list[ToolCall] = []
        while True:
            if self._skips_newline and self._held:
                self._held = self._held.removeprefix("\n")
                self._skips_newline = False
            begin = self._held.find(OPEN)
            if begin < 0:
                num_free = len(self._held) - _overlap(self._held, OPEN)
                content += self._held[:num_free]
                self._held = self._held[num_free:]
                return Parsed(content, tuple(calls))
            content += self._held[:begin]
            self._held = self._held[begin:]
            end = self._held.find(CLOSE)
            if end < 0:
                return Parsed(content, tuple(calls))
            whole = self._held[: end + len(CLOSE)]
            self._held = self._held[len(whole) :]
            call = self._call(whole[len(OPEN) : end])
            if call is None:
                content += whole
            else:
                calls.append(call)
                self._skips_newline = True

    def finish(self) -> Parsed:
        """Models often end by their last call and leave its end mark out."""
        held, self._held = self._held, ""
        call = self._call(held[len(OPEN) :]) if held.startswith(OPEN) else None
        return Parsed(held) if call is None else Parsed("", (call,))

    def _call(self, text: str) -> ToolCall | None:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return None
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or name not in self._names:
            return None
        return make_call(name, value.get("arguments", {}))


class ForcedParser:
    """The whole text is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._text = ""

    def feed(self, text: str) -> Parsed:
        self._text += text
        return Parsed()

    def finish(self) -> Parsed:
        """Cut off by max_tokens, the arguments are not JSON; OpenAI, too, returns them so."""
        return Parsed("", (make_call(self._name, self._text),))


class RequiredParser:
    """The whole text is a list of calls."""

    def __init__(self) -> None:
        self._text = ""

    def feed(self, text: str) -> Parsed:
        self._text += text
        return Parsed()

    def finish(self) -> Parsed:
        """A list that max_tokens cut off is content: the caller sees finish_reason "length"."""
        try:
            calls = json.loads(self._text)
        except ValueError:
            return Parsed(self._text)
        return Parsed("", tuple(make_call(call["name"], call["arguments"]) for call in calls))


def finish_reason(tools: ToolUse, one: CompletionOutput, has_calls: bool) -> Any:
    """As OpenAI: "tool_calls", but "stop" where the caller named the function."""
    if has_calls and one.finish_reason == "stop" and tools.forced is None:
        return "tool_calls"
    return one.finish_reason


def make_call(name: str, arguments: Any) -> ToolCall:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(id=f"call_{new_id()[:24]}", function=FunctionCall(name=name, arguments=text))


def _json(schema: dict[str, Any]) -> StructuredOutputsParams:
    """Not for people: no lines and indents."""
    return StructuredOutputsParams(json=schema, whitespace_pattern=" ?")


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "additionalProperties": False}


def _moved(schema: Any, root: str) -> Any:
    """A schema as part of another one, at `root`: what it refers to in itself moves along."""
    if isinstance(schema, list):
        return [_moved(one, root) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(value, root) for name, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved


def _call_schema(name: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{name}"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _overlap(text: str, mark: str) -> int:
    """Length of the longest beginning of `mark` that ends `text`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
