"""Forms: how the model writes its calls and its reasoning, as the operator or the template says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flexinfer.server.parsing import reasoning, tool_formats
from flexinfer.server.parsing.harmony_marks import HarmonyMarks

DEFAULT_TOOLS = "hermes"
"""In which templates without tools are told of them."""


@dataclass(frozen=True)
class Forms:
    tools: tool_formats.ToolFormat
    reasoning: reasoning.ReasoningForm | None
    """None: it is content."""
    harmony: HarmonyMarks | None = None
    """The form of all, in place of the other two."""

    @property
    def tells_reasoning(self) -> bool:
        """Apart from the answer."""
        return self.harmony is not None or self.reasoning is not None


def choose_forms(
    tool_call_parser: str,
    reasoning_parser: str | None,
    tokenizer: Any | None,
    *,
    knows_tools: bool,
    writes_harmony: bool,
) -> Forms:
    """The last two: what the chat template does. Raises ValueError for what does not go with it."""
    is_harmony = _is_harmony(tool_call_parser, reasoning_parser, writes_harmony)
    if not knows_tools and (is_harmony or tool_call_parser != DEFAULT_TOOLS):
        name = "Harmony" if is_harmony else f"the tool call parser {tool_call_parser!r}"
        raise ValueError(
            f"{name} reads another form than the one that models are told here: the chat template "
            "knows no tools, which are described in Hermes' form; give --chat-template, or "
            "--tool-call-parser hermes"
        )
    tools = tool_formats.tool_format(tool_call_parser)
    if is_harmony:
        return Forms(tools, None, HarmonyMarks(tokenizer))
    return Forms(tools, reasoning.reasoning_form(reasoning_parser) if reasoning_parser else None)


def _is_harmony(calls: str, thinks: str | None, writes_harmony: bool) -> bool:
    """By either name, or by the template where none is given. Raises ValueError for one name of
    it and one of another form."""
    named = calls in tool_formats.HARMONY, thinks in reasoning.HARMONY
    if not any(named):
        return writes_harmony and calls == DEFAULT_TOOLS and thinks is None
    if (calls != DEFAULT_TOOLS and not named[0]) or (thinks is not None and not named[1]):
        raise ValueError(
            f"--tool-call-parser {calls} does not go with --reasoning-parser {thinks}: Harmony is "
            "the form of both, openai and openai_gptoss"
        )
    return True
