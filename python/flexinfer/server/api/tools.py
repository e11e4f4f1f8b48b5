"""Tool calls: what forces the model to make one, and who reads them in its text.

auto               free text; calls in it are read in the form that --tool-call-parser names
required           constrained to a JSON list of calls, at least one
a named function   constrained to the JSON of its arguments

Harmony has a form of its own for what is forced: the model's, with one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flexinfer.errors import RequestError
from flexinfer.outputs import CompletionOutput
from flexinfer.sampling.closed_schema import closed_schema
from flexinfer.sampling.grammars import StructuredOutputsParams
from flexinfer.server.http.errors import bad_request
from flexinfer.server.parsing.harmony_marks import HarmonyMarks
from flexinfer.server.parsing.json_calls import ForcedCall, RequiredCalls
from flexinfer.server.parsing.pieces import Parser
from flexinfer.server.protocol.chat import NamedToolChoice, Tool, ToolChoice
from flexinfer.server.state import ServerState

BLANK = " ?"
"""Between the tokens of JSON that no person reads: no lines and indents."""


@dataclass(frozen=True)
class ToolUse:
    """What the fields `tools`, `tool_choice` and `parallel_tool_calls` come to."""

    tools: tuple[Tool, ...] = ()
    """Those that may be called."""
    uncalled: tuple[Tool, ...] = ()
    """Those that may not, but that the model is told of."""
    forced: str | None = None
    """The function that must be called."""
    required: bool = False
    parallel: bool = True
    """Otherwise the first call is the only one."""
    harmony: HarmonyMarks | None = None
    """The form in which the model writes all calls, forced ones too."""

    @property
    def in_prompt(self) -> tuple[Tool, ...]:
        return self.tools + self.uncalled

    @property
    def structure(self) -> StructuredOutputsParams | None:
        """What forces the call."""
        if self.harmony is not None:
            return self._harmony_call(self.harmony)
        if self.forced is not None:
            tool = next(tool for tool in self.tools if tool.function.name == self.forced)
            return _json(_parameters(tool), is_lenient=not tool.function.strict)
        if not self.required:
            return None
        schemas = {tool.function.name: _parameters(tool) for tool in self.tools}
        calls = {
            "type": "array",
            "items": {"anyOf": [_call_schema(name) for name in schemas]},
            "minItems": 1,
            "$defs": {name: _moved(schema, f"#/$defs/{name}") for name, schema in schemas.items()},
        }
        return _json(
            calls if self.parallel else calls | {"maxItems": 1},
            is_lenient=not all(tool.function.strict for tool in self.tools),
        )

    def _harmony_call(self, marks: HarmonyMarks) -> StructuredOutputsParams | None:
        """One call: the model ends its turn with it."""
        if self.forced is None and not self.required:
            return None
        tools = [tool for tool in self.tools if self.forced in (None, tool.function.name)]
        schemas = {}
        for tool in tools:
            settings = {"whitespace_pattern": BLANK, "lenient": not tool.function.strict}
            try:
                schema = closed_schema(_parameters(tool))
            except ValueError as error:
                name = tool.function.name
                raise bad_request(
                    f"the parameters of the tool {name!r} cannot be compiled: {error}", "tools"
                ) from None
            schemas[tool.function.name] = {**schema, "x-guidance": settings}
        return StructuredOutputsParams(grammar=marks.call(schemas))

    def parser(self, state: ServerState) -> Parser | None:
        """Of one choice; None: the text is the content."""
        if self.forced is not None:
            return ForcedCall(self.forced)
        schemas = {tool.function.name: tool.function.parameters or {} for tool in self.tools}
        if self.required:
            return RequiredCalls(schemas)
        return state.forms.tools.make(schemas) if schemas else None


def tool_use(
    state: ServerState,
    tools: Sequence[Tool] | None,
    choice: ToolChoice | None,
    parallel: bool | None,
) -> ToolUse:
    """Raises APIError for a choice without tools, or of one that is not there."""
    if not tools:
        if choice not in (None, "none"):
            raise bad_request("tool_choice is only allowed with tools", "tool_choice")
        return ToolUse()
    given = tuple(tools)
    if choice == "none":
        # Where the template knows none, words would ask for calls that nobody reads.
        is_told = state.chat.knows_tools and not state.settings.exclude_tools_when_tool_choice_none
        return ToolUse(uncalled=given if is_told else ())
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        if name not in {tool.function.name for tool in given}:
            raise bad_request(f"tool_choice names {name!r}, which is not in tools", "tool_choice")
        return ToolUse(given, forced=name, harmony=state.forms.harmony)
    if choice != "required" and not state.settings.enable_auto_tool_choice:
        raise bad_request(
            'tool_choice "auto" is off on this server (--no-enable-auto-tool-choice): name a '
            'function, or say "required" or "none"',
            "tool_choice",
        )
    return ToolUse(
        given,
        required=choice == "required",
        parallel=parallel is not False,
        harmony=state.forms.harmony,
    )


async def check_schemas(state: ServerState, tenant: str, tools: ToolUse) -> None:
    """Raises APIError for a forced call whose schema no grammar holds, with the tool's name."""
    structure = tools.structure
    if structure is None:
        return
    try:
        await state.grammar(tenant, structure)
    except RequestError as error:
        for tool in tools.tools:
            if tools.forced not in (None, tool.function.name):
                continue
            alone = ToolUse((tool,), forced=tool.function.name).structure
            assert alone is not None
            try:
                await state.grammar(tenant, alone)
            except RequestError as found:
                name = tool.function.name
                raise bad_request(
                    f"the parameters of the tool {name!r}: {found}", "tools"
                ) from None
        raise bad_request(str(error), "tools") from None


def finish_reason(tools: ToolUse, one: CompletionOutput, has_calls: bool) -> Any:
    """As OpenAI: "tool_calls", but "stop" where the caller named the function."""
    if has_calls and one.finish_reason == "stop" and tools.forced is None:
        return "tool_calls"
    return one.finish_reason


def _json(schema: dict[str, Any], *, is_lenient: bool) -> StructuredOutputsParams:
    return StructuredOutputsParams(json=schema, whitespace_pattern=BLANK, is_lenient=is_lenient)


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
