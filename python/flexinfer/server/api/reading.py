"""Reading: how the text of one request is to be read, and what its sampling needs for that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flexinfer.sampling.grammars import LarkPreamble, Preamble
from flexinfer.server.api.tools import ToolUse
from flexinfer.server.parsing.harmony import HarmonyParser
from flexinfer.server.parsing.harmony_marks import HarmonyMarks
from flexinfer.server.parsing.pieces import Parser
from flexinfer.server.parsing.reasoning import (
    ReasoningForm,
    ReasoningParser,
    num_reasoning_tokens,
    opened_by,
)
from flexinfer.server.state import ServerState

NUM_TAIL_TOKENS = 32
"""Of a prompt, in which a chat template may have opened or closed its reasoning."""


@dataclass(frozen=True)
class Reading:
    """Without reasoning."""

    state: ServerState
    tools: ToolUse
    shows_reasoning: bool = True

    @property
    def tells_reasoning(self) -> bool:
        """Apart from the rest."""
        return False

    @property
    def needs_special_tokens(self) -> bool:
        """In the text: they are the marks that it is read by."""
        return bool(self.tools.tools) and self.state.forms.tools.is_special

    @property
    def hides_special_tokens(self) -> bool:
        """Of itself: callers that want none in their text need not be asked."""
        return False

    @property
    def preamble(self) -> Preamble | LarkPreamble | None:
        """What the model writes before a structure."""
        return None

    def parser(self) -> Parser | None:
        """None: all of it is content."""
        return self.tools.parser(self.state)

    def num_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """With those of the marks, of an answer that has reasoning."""
        return 0

    @property
    def num_id_chars(self) -> int:
        """Mistral's templates take ids of nine letters and digits only."""
        return 9 if self.state.settings.tool_call_parser == "mistral" else 0


@dataclass(frozen=True, kw_only=True)
class TagReading(Reading):
    """Reasoning between two tags, then the rest."""

    form: ReasoningForm
    is_open: bool | None
    """Whether it begins in reasoning; None: the text says so."""

    @property
    def tells_reasoning(self) -> bool:
        return True

    @property
    def needs_special_tokens(self) -> bool:
        is_marked = self.form.is_special and self.is_open is not False
        return is_marked or super().needs_special_tokens

    @property
    def preamble(self) -> Preamble | None:
        if self.is_open is False:
            return None
        return Preamble(self.form.close, None if self.is_open else self.form.open)

    def parser(self) -> Parser | None:
        calls = super().parser()
        return calls if self.is_open is False else ReasoningParser(self.form, self.is_open, calls)

    def num_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        return num_reasoning_tokens(self.form, self.state.llm.tokenizer, token_ids)


@dataclass(frozen=True, kw_only=True)
class HarmonyReading(Reading):
    """Reasoning, content and calls in messages of their own."""

    marks: HarmonyMarks
    opening: str
    """The header that the prompt has begun."""

    @property
    def tells_reasoning(self) -> bool:
        return True

    @property
    def needs_special_tokens(self) -> bool:
        return True

    @property
    def hides_special_tokens(self) -> bool:
        return True

    @property
    def preamble(self) -> LarkPreamble | None:
        is_call = self.tools.forced is not None or self.tools.required
        rules = self.marks.before_answer(self.opening, is_call=is_call)
        return None if rules is None else LarkPreamble(rules)

    def parser(self) -> Parser:
        names = {tool.function.name for tool in self.tools.tools}
        return HarmonyParser(names, self.opening)

    def num_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        return self.marks.num_reasoning_tokens(token_ids, self.opening)


def reading_of(
    state: ServerState, tools: ToolUse, token_ids: list[int], shows_reasoning: bool
) -> Reading:
    """`token_ids`: the prompt."""
    given: dict[str, Any] = {"state": state, "tools": tools, "shows_reasoning": shows_reasoning}
    if state.forms.harmony is not None:
        marks = state.forms.harmony
        return HarmonyReading(**given, marks=marks, opening=marks.opening(token_ids))
    if state.forms.reasoning is None:
        return Reading(**given)
    assert state.llm.tokenizer is not None
    tail = state.llm.tokenizer.decode(token_ids[-NUM_TAIL_TOKENS:], skip_special_tokens=False)
    return TagReading(
        **given, form=state.forms.reasoning, is_open=opened_by(state.forms.reasoning, tail)
    )
