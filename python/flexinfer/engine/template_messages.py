"""The messages of a chat as its template takes them, for all callers alike: server, LLM.chat and
conversations. What is given is never changed; what comes of it may be given again."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from flexinfer.engine.chat_template import TemplateTraits
from flexinfer.errors import RequestError

TemplateMessage = dict[str, Any]

logger = logging.getLogger(__name__)


def template_messages(messages: Sequence[Any], traits: TemplateTraits) -> list[TemplateMessage]:
    """Raises RequestError for what is no message of text."""
    checked = [_checked(message) for message in messages]
    if not traits.knows_developer:
        checked = _developers_as_system(checked)
    return [_as_taken(message, traits) for message in checked]


def plain_text(content: Any) -> str:
    """Of a message: a text, a list of parts, or None for none."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content or ())


def _checked(message: Any) -> Mapping[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"a message is a dict with a role and a content, got {message!r}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise RequestError(f"the role of a message must be a string, got {role!r} in {message!r}")
    if not isinstance(content, (list, tuple)):
        has_more = content is None and not message.keys() <= {"role", "content"}  # calls of tools
        if not isinstance(content, str) and not has_more:
            raise RequestError(f"the content of a message must be text, got {message!r}")
        return message
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise RequestError(f"parts of a message's content can be text alone, got {content!r}")
    return message


def _developers_as_system(messages: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Where that leaves instructions behind the first message, all become one there: most
    templates know them at the start alone."""
    if all(message["role"] != "developer" for message in messages):
        return messages
    named = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
    if all(message["role"] != "system" for message in named[1:]):
        return named
    texts = [plain_text(m.get("content")) for m in named if m["role"] == "system"]
    joined = {"role": "system", "content": "\n\n".join(filter(None, texts))}
    return [joined, *(m for m in named if m["role"] != "system")]


def _as_taken(message: Mapping[str, Any], traits: TemplateTraits) -> TemplateMessage:
    content: Any = message.get("content")
    if not traits.takes_parts or message["role"] == "tool":  # which templates know as text alone
        content = plain_text(content)
    elif isinstance(content, str):
        content = [{"type": "text", "text": content}]
    else:
        content = [{**part, "type": "text"} for part in content or ()]
    taken = {**message, "content": content}
    calls = message.get("tool_calls")
    if message["role"] == "assistant" and isinstance(calls, (list, tuple)):
        taken["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
        if not calls:
            del taken["tool_calls"]
    return taken


def _with_parsed_arguments(call: Any) -> Any:
    """Templates write them as JSON themselves."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = _parsed(function.get("arguments"), function.get("name"))
    return {**call, "function": {**function, "arguments": arguments}}


def _parsed(given: Any, name: Any) -> Mapping[str, Any]:
    """An object in any case: a call that was cut off stays in the history, and would end it."""
    value = given or {}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if isinstance(value, Mapping):
        return value
    logger.warning(
        "the arguments of a call of %.64r in a chat's history are no JSON object (%d characters): "
        "the model is shown {}, so that the chat can go on",
        name,
        len(str(given)),
    )
    return {}
