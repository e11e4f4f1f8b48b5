"""The messages of a chat as gpt-oss' chat template expects them.

It knows one call a message, whose answer comes next, reasoning as `thinking` and not beside the
content of a call, instructions at the start alone; what stands otherwise it drops, or refuses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from flexinfer.engine.template_messages import TemplateMessage

INSTRUCTING = ("system", "developer")


def harmony_messages(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """The same chat; nothing of it is changed in place."""
    instructions = [m["content"] for m in messages if m["role"] in INSTRUCTING and m["content"]]
    out: list[TemplateMessage] = []
    if instructions:
        out.append({"role": "system", "content": "\n\n".join(instructions)})
    turns = _joined(message for message in messages if message["role"] not in INSTRUCTING)
    for idx, message in enumerate(turns):
        if message["role"] == "tool" and idx and turns[idx - 1]["role"] in ("assistant", "tool"):
            continue  # stands with its call
        if message["role"] == "assistant":
            out += _assistant(message, list(_answers(turns[idx + 1 :])), idx == len(turns) - 1)
        else:
            out.append(message)
    return out


def harmony_tools(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The template puts each description into a comment, and fails without one."""
    return [{**tool, "function": {"description": "", **tool["function"]}} for tool in tools]


def _joined(messages: Iterable[TemplateMessage]) -> list[TemplateMessage]:
    """What one answer consisted of is one message, though clients may send it in parts."""
    out: list[TemplateMessage] = []
    for message in messages:
        last = out[-1] if out else None
        if last is None or not _goes_on(last, message):
            out.append(message)
            continue
        joined = {**last, "content": _lines(last["content"], message["content"])}
        thoughts = _lines(last.get("reasoning_content"), message.get("reasoning_content"))
        if thoughts:
            joined["reasoning_content"] = thoughts
        calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
        if calls:
            joined["tool_calls"] = calls
        out[-1] = joined
    return out


def _goes_on(last: TemplateMessage, message: TemplateMessage) -> bool:
    if last["role"] != "assistant" or message["role"] != "assistant":
        return False
    return "tool_calls" in message or not (last["content"] or "tool_calls" in last)


def _answers(messages: Sequence[TemplateMessage]) -> Iterator[TemplateMessage]:
    for message in messages:
        if message["role"] != "tool":
            return
        yield message


def _assistant(
    message: TemplateMessage, answers: list[TemplateMessage], is_last: bool
) -> list[TemplateMessage]:
    """With the answers of its calls, each behind its own."""
    plain = {"role": "assistant", "content": message["content"]}
    thoughts = message.get("reasoning_content")
    calls = message.get("tool_calls", ())
    if not calls:
        if thoughts:
            plain["thinking"] = thoughts
        is_empty = not message["content"] and not is_last  # nothing was said but thoughts
        return [*([] if is_empty else [plain]), *answers]
    out: list[TemplateMessage] = []
    for idx, call in enumerate(calls):
        one: TemplateMessage = {"role": "assistant", "content": "", "tool_calls": [call]}
        if idx == 0:
            one["thinking"] = _lines(thoughts, message["content"])
        out.append(one)
        found = next((a for a in answers if a.get("tool_call_id") == call["id"]), None)
        if found is not None:
            answers.remove(found)
            out.append(found)
    return [*out, *answers]


def _lines(first: str | None, second: str | None) -> str:
    return "\n".join(filter(None, (first, second)))
