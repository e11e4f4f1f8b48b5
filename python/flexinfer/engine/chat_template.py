"""TemplateTraits: what a chat template makes of messages, read off its source, once each.

The rules are vLLM's (renderers/hf.py), so that both render a request alike. A template takes parts
if it goes through the content of a message in a loop; variables are followed by their names alone,
wherever they are assigned.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from flexinfer.errors import RequestError

if TYPE_CHECKING:
    from jinja2 import nodes

CONTENT_FORMATS = ("auto", "string", "openai")
"""As vLLM names them: as the template has it; text; a list of parts."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TemplateTraits:
    takes_parts: bool = False
    """The content of a message is a list of parts, even if it is but a text; else a text."""
    knows_developer: bool = True
    """There is a role of this name; else developers speak as the system."""


def template_source(tokenizer: Any, chat_template: Any = None, tools: Any = None) -> str:
    """The Jinja that `apply_chat_template` would render: a tokenizer may have several templates,
    one of them for tools. "" for what is none. Raises ValueError where there is none to choose."""
    find = getattr(tokenizer, "get_chat_template", None)
    if find is not None:
        source = find(chat_template, tools)
    else:
        source = chat_template or getattr(tokenizer, "chat_template", None)
    return source if isinstance(source, str) else ""


def template_traits(source: str, content_format: str = "auto") -> TemplateTraits:
    """`content_format`: one of CONTENT_FORMATS, what the caller knows better. Raises
    RequestError."""
    if content_format not in CONTENT_FORMATS:
        raise RequestError(
            "chat_template_content_format must be one of "
            f"{', '.join(map(repr, CONTENT_FORMATS))}, got {content_format!r}"
        )
    traits = _traits_of(source)
    if content_format == "auto":
        return traits
    return replace(traits, takes_parts=content_format == "openai")


@lru_cache(maxsize=32)
def _traits_of(source: str) -> TemplateTraits:
    """Bounded: callers of `LLM.chat` bring templates of their own."""
    knows_developer = '"developer"' in source or "'developer'" in source
    return TemplateTraits(_takes_parts(source), knows_developer)


def _takes_parts(source: str) -> bool:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        tree = _compile_jinja_template(source).environment.parse(source)
        return next(_content_loops(tree), None) is not None
    except Exception as error:  # of any kind; rendering says what is wrong with a template
        logger.debug("a chat template cannot be read: %s", error)
        return False


def _content_loops(tree: nodes.Template) -> Iterator[nodes.For]:
    """{% for part in message['content'] %}, {% for part in content %}, and the same of what a
    macro is given as a message's content."""
    from jinja2 import nodes

    messages = _messages(tree)
    in_macros: set[int] = set()
    for macro in tree.find_all(nodes.Macro):
        contents = _content_parameters(tree, macro, messages)
        for loop in macro.find_all(nodes.For):
            in_macros.add(id(loop))
            if isinstance(loop.iter, nodes.Name) and loop.iter.name in contents:
                yield loop
    for loop in tree.find_all(nodes.For):
        is_content = isinstance(loop.iter, nodes.Name) and loop.iter.name == "content"
        is_free = is_content and id(loop) not in in_macros
        if is_free or any(_reads(loop.iter, name, "content") for name in messages):
            yield loop


def _messages(tree: nodes.Template) -> set[str]:
    """Names of single messages: of loops over all, or over a variable that has some of them."""
    from jinja2 import nodes

    lists = ["messages"]
    for name in lists:  # grows meanwhile
        for assigned in tree.find_all(nodes.Assign):
            target = assigned.target
            if isinstance(target, nodes.Name) and _reads(assigned.node, name):
                lists += [target.name] if target.name not in lists else []
    return {
        loop.target.name
        for loop in tree.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name) and any(_reads(loop.iter, name) for name in lists)
    }


def _content_parameters(tree: nodes.Template, macro: nodes.Macro, messages: set[str]) -> set[str]:
    """Those of a macro that get the content of a message in some call."""
    from jinja2 import nodes

    names = [parameter.name for parameter in macro.args]
    found: set[str] = set()
    for call in tree.find_all(nodes.Call):
        if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
            continue
        given = [*zip(names, call.args, strict=False)]
        given += [(one.key, one.value) for one in call.kwargs if one.key in names]
        found |= {
            name
            for name, value in given
            if any(_reads(value, message, "content") for message in messages)
        }
    return found


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """It is `name`, or `name[key]`, perhaps filtered, tested or sliced."""
    from jinja2 import nodes

    while isinstance(node, (nodes.Filter, nodes.Test)) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key is not None:
        if isinstance(node, nodes.Getattr):
            found: Any = node.attr
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
            found = node.arg.value
        else:
            return False
        if found != key:
            return False
        node = node.node
    return isinstance(node, nodes.Name) and node.name == name and node.ctx == "load"
