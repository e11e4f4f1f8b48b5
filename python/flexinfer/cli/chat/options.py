"""The options of `flexinfer chat`: one field each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from flexinfer.cli.option_model import option
from flexinfer.cli.options import AdminKey, ApiKey
from flexinfer.cli.settings import EngineSettings

if TYPE_CHECKING:
    from flexinfer.sampling.params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    system: Annotated[str | None, option("System prompt; '' for none.")] = None
    max_tokens: Annotated[int, option("Maximum number of tokens per answer.", min=1)] = 256
    temperature: Annotated[float, option("0 is greedy.", min=0.0)] = 0.0
    top_p: Annotated[float, option("Smallest set of tokens of this probability.")] = 1.0
    top_k: Annotated[int, option("Only the k most probable tokens; 0: all.")] = 0
    repetition_penalty: Annotated[float, option("Above 1: less repetition.")] = 1.0
    url: Annotated[
        str | None,
        option("Chat with the server there instead; --model is then a served name."),
    ] = None
    api_key: ApiKey = None
    admin_api_key: AdminKey = None


@dataclass(frozen=True, kw_only=True)
class ChatSettings(EngineSettings, ChatOptions):
    """Everything that the command was given; the last base's fields come first in the help."""

    def sampling(self) -> SamplingParams:
        """Raises ValueError for numbers out of range."""
        from flexinfer.sampling.params import SamplingParams

        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            repetition_penalty=self.repetition_penalty,
            max_tokens=self.max_tokens,
        )
