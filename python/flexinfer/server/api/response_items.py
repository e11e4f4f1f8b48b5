"""Output items of /v1/responses: one for each part of an answer, in its order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from flexinfer.server.observability.logs import new_id
from flexinfer.server.parsing.pieces import Answer, CallPart, Content, TextPart
from flexinfer.server.protocol.chat import ContentLogprob
from flexinfer.server.protocol.responses import (
    FunctionCallItem,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
)

Status = Literal["in_progress", "completed", "incomplete"]


def items_of(
    answer: Answer,
    call_ids: Sequence[str],
    ids: Sequence[str],
    status: Status,
    logprobs: Sequence[ContentLogprob] = (),
) -> list[OutputItem]:
    """`ids`: of the items, as far as they have them yet. Only the last one may be incomplete.
    `logprobs`: of the only one."""
    parts = answer.parts or [TextPart(Content, "")]
    given = [*ids, *(new_item_id(part) for part in parts[len(ids) :])]
    names = _names_of_calls(parts, call_ids)
    items = [item_of(*one, "completed") for one in zip(parts, given, names, strict=True)]
    if logprobs and isinstance(items[0], OutputMessage):
        items[0].content[0].logprobs = list(logprobs)
    return [*items[:-1], items[-1].model_copy(update={"status": status})]


def item_of(
    part: TextPart | CallPart, item_id: str, call_id: str | None, status: Status
) -> OutputItem:
    """With nothing in it while it is in progress."""
    is_empty = status == "in_progress"
    if isinstance(part, CallPart):
        return FunctionCallItem(
            type="function_call",
            id=item_id,
            call_id=call_id or "",
            name=part.name,
            arguments="" if is_empty else part.arguments,
            status=status,
        )
    if part.kind is Content:
        content = [] if is_empty else [OutputText(text=part.text)]
        return OutputMessage(id=item_id, status=status, content=content)
    thoughts = [] if is_empty else [ReasoningText(text=part.text)]
    return ReasoningItem(type="reasoning", id=item_id, status=status, content=thoughts)


def new_item_id(part: TextPart | CallPart) -> str:
    if isinstance(part, CallPart):
        return f"fc_{new_id()}"
    return f"msg_{new_id()}" if part.kind is Content else f"rs_{new_id()}"


def _names_of_calls(
    parts: Sequence[TextPart | CallPart], call_ids: Sequence[str]
) -> Iterator[str | None]:
    names = iter(call_ids)
    return (next(names) if isinstance(part, CallPart) else None for part in parts)
