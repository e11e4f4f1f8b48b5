"""Options of `flexinfer serve` about what the model reads of chats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from flexinfer.cli.option_model import option


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    panel: ClassVar[str] = "Chat templates"
    chat_template: Annotated[
        str | None, option("Jinja file or text, in place of the tokenizer's.")
    ] = None
    chat_template_content_format: Annotated[
        str, option("What it takes messages as: string, openai (parts), or auto (read off it).")
    ] = "auto"
    default_chat_template_kwargs: Annotated[
        str | None,
        option(
            "What the template gets of every request that does not say it itself, as JSON: "
            '{"enable_thinking": false}.'
        ),
    ] = None
    exclude_tools_when_tool_choice_none: Annotated[
        bool, option("Keep tools out of prompts where none may be called.")
    ] = False
