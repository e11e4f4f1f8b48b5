"""The options of `flexinfer chat`: one field each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from flexinfer.cli.chat.sampling import ChatSampling
from flexinfer.cli.option_model import option
from flexinfer.cli.options import AdminKey, ApiKey
from flexinfer.cli.settings import EngineSettings


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    system: Annotated[str | None, option("System prompt; '' for none.")] = None
    max_tokens: Annotated[int, option("Maximum number of tokens per answer.", min=1)] = 256
    temperature: Annotated[
        float | None,
        option(
            "0 is greedy. By default what the model's generation_config.json says, as of the "
            "others; 0 if it says nothing, with --url what the server has.",
            min=0.0,
        ),
    ] = None
    top_p: Annotated[float | None, option("Smallest set of tokens of this probability.")] = None
    top_k: Annotated[int | None, option("Only the k most probable tokens; 0: all.")] = None
    repetition_penalty: Annotated[float | None, option("Above 1: less repetition.")] = None
    url: Annotated[
        str | None,
        option("Chat with the server there instead; --model is then a served name."),
    ] = None
    api_key: ApiKey = None
    admin_api_key: AdminKey = None


@dataclass(frozen=True, kw_only=True)
class ChatSettings(EngineSettings, ChatOptions):
    """Everything that the command was given; the last base's fields come first in the help."""

    def sampling(self) -> ChatSampling:
        """Raises ValueError for numbers out of range."""
        return ChatSampling(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            repetition_penalty=self.repetition_penalty,
        )
