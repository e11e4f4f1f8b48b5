"""ChatRenderer: from the messages of a chat to token ids, by the model's chat template.

A template without tools gets them in words: Hermes' way, which is read back.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flexinfer.engine.chat_template import TemplateTraits, template_traits
from flexinfer.engine.history import writes_harmony
from flexinfer.engine.inputs import InputProcessor
from flexinfer.engine.template_messages import template_messages
from flexinfer.errors import RequestError
from flexinfer.server.harmony_messages import harmony_messages, harmony_tools
from flexinfer.server.http.errors import bad_request
from flexinfer.server.protocol.chat import Message, Tool

logger = logging.getLogger(__name__)

TOOL_PROMPT = """\
You may call these functions, each described by a JSON schema:
<tools>
{tools}
</tools>
To call one, answer with its name and arguments as JSON, like this:
<tool_call>
{{"name": "function name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


@dataclass(frozen=True)
class ChatPrompt:
    """All that decides what the model reads."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    documents: Sequence[Mapping[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.add_generation_prompt and self.continue_final_message:
            raise bad_request(
                "continue_final_message continues the last message: "
                "add_generation_prompt must be false",
                "continue_final_message",
            )


class ChatRenderer:
    """Thread-safe: the tokenizer is only read."""

    def __init__(
        self,
        inputs: InputProcessor,
        chat_template: str | None,
        content_format: str = "auto",
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """`chat_template`: Jinja source of the operator; None: that of the tokenizer.
        `content_format`: one of CONTENT_FORMATS. `template_kwargs`: what the template gets of
        prompts that do not say it. Raises ValueError for some that it would not see."""
        if template_kwargs:
            inputs.check_template_kwargs(template_kwargs)
        self._inputs = inputs
        self._template = chat_template
        self._content_format = content_format
        self._template_kwargs = dict(template_kwargs or {})
        tokenizer = inputs.tokenizer
        own = getattr(tokenizer, "chat_template", None)
        source = str(chat_template or own or "")
        self.knows_tools = "tools" in source
        self.writes_harmony = writes_harmony(source)
        self._knows_documents = "documents" in source
        found, wanted = template_traits(source), template_traits(source, content_format)
        if found != wanted:
            logger.warning(
                "chat_template_content_format is %r, but the chat template seems to take %s: what "
                "it does not read of messages is lost without an error",
                content_format,
                "a list of parts" if found.takes_parts else "a text",
            )

    async def render(self, prompt: ChatPrompt) -> list[int]:
        """Token ids; rendering and tokenizing run in a thread. Raises APIError, RequestError."""
        return await asyncio.to_thread(self._render, prompt)

    def _render(self, prompt: ChatPrompt) -> list[int]:
        from jinja2 import TemplateError

        if prompt.template_kwargs:
            try:
                self._inputs.check_template_kwargs(prompt.template_kwargs)
            except RequestError as error:
                raise bad_request(str(error), "chat_template_kwargs") from None
        if prompt.documents and not self._knows_documents:
            raise bad_request("the model's chat template has no place for documents", "documents")
        messages = [as_dict(message) for message in prompt.messages]
        tools = [tool.model_dump(exclude_none=True) for tool in prompt.tools] or None
        if self.writes_harmony or not self.knows_tools:
            messages = template_messages(messages, TemplateTraits())  # text, to be put otherwise
        if not self.knows_tools:
            messages = with_tools_in_words(messages, tools)
            tools = None
        if self.writes_harmony:
            messages = harmony_messages(messages)
            tools = tools and harmony_tools(tools)
        try:
            text = self._inputs.render(
                messages,
                self._template,
                chat_template_content_format=self._content_format,
                tools=tools,
                documents=prompt.documents or None,
                add_generation_prompt=prompt.add_generation_prompt,
                continue_final_message=prompt.continue_final_message,
                **self._template_kwargs | dict(prompt.template_kwargs),
            )
            check_length(text, self._inputs, "messages")
            return self._inputs.tokenize_rendered(text)
        except TemplateError as error:
            raise bad_request(
                f"the model's chat template refuses these messages: {error}", "messages"
            ) from None
        except RequestError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise bad_request(
                f"the model's chat template cannot render these messages: {error}", "messages"
            ) from None


def check_length(text: str, inputs: InputProcessor, param: str) -> None:
    """Raises APIError for a text that no tokens within the context hold: it is not tokenized."""
    check_num_chars(len(text), inputs, param)


def check_num_chars(num_chars: int, inputs: InputProcessor, param: str) -> None:
    if num_chars > inputs.max_chars:
        raise bad_request(
            f"This model's maximum context length is {inputs.max_model_len} tokens, which hold at "
            f"most {inputs.max_chars} characters; this is {num_chars}: shorten the prompt",
            param,
            "context_length_exceeded",
        )


def as_dict(message: Message) -> dict[str, Any]:
    """A message as `InputProcessor.render` takes it."""
    content: Any = message.content
    if not isinstance(content, str):
        content = [{"type": "text", "text": part.words} for part in content or ()]
    out: dict[str, Any] = {"role": message.role, "content": content}
    if message.name is not None:
        out["name"] = message.name
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        out["reasoning_content"] = reasoning
    if message.tool_calls:
        out["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    return out


def with_tools_in_words(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    """The same chat for a template that knows neither tools nor their calls and answers."""
    out: list[dict[str, Any]] = []
    for message in messages:
        plain = {"role": message["role"], "content": message["content"]}
        if message["role"] == "tool":
            answer = f"<tool_response>\n{message['content']}\n</tool_response>"
            plain = {"role": "user", "content": answer}
        for call in message.get("tool_calls", ()):
            text = json.dumps(call["function"], ensure_ascii=False)
            before = f"{plain['content']}\n" if plain["content"] else ""
            plain["content"] = f"{before}<tool_call>\n{text}\n</tool_call>"
        out.append(plain)
    if tools:
        lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        words = TOOL_PROMPT.format(tools=lines)
        if out and out[0]["role"] in ("system", "developer"):
            out[0]["content"] = f"{out[0]['content']}\n\n{words}".lstrip()
        else:
            out.insert(0, {"role": "system", "content": words})
    return out
