"""Backend: what `flexinfer chat` needs of an engine or a server, and its sessions."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import RenderableType

    from flexinfer.cli.chat.sampling import ChatSampling
    from flexinfer.types import ChatMessage


class BackendError(Exception):
    """A turn could not be answered; says why. The conversation is as before."""


@dataclass
class AnswerNumbers:
    """How one answer went. None: not known."""

    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_tokens: int = 0
    chunks_aliased: int | None = None
    chunks_copied: int | None = None
    first_token_s: float | None = None
    """From the question to the first token."""
    decode_s: float = 0.0
    """From the first token to the last."""
    finish_reason: str | None = None

    @property
    def tokens_per_s(self) -> float:
        """After the first token; 0 if there was only one."""
        return (self.num_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0

    def __str__(self) -> str:
        from flexinfer.cli.terminal_text import ms_text

        parts = []
        if self.num_prompt_tokens is not None:
            reused = "" if self.num_cached_tokens is None else f", {self.num_cached_tokens} reused"
            parts.append(f"{self.num_prompt_tokens} prompt tokens{reused}")
        if self.chunks_aliased is not None:
            parts.append(f"chunks: {self.chunks_aliased} aliased, {self.chunks_copied} copied")
        parts.append(
            f"first token after {ms_text(self.first_token_s)} ms, {self.tokens_per_s:.0f} tokens/s"
        )
        return "; ".join(parts) + _ENDINGS.get(self.finish_reason or "", "")


_ENDINGS = {"length": "; cut at the limit of tokens", "abort": "; stopped"}


class ChatSession(Protocol):
    """One conversation."""

    @property
    def messages(self) -> Sequence[ChatMessage]: ...

    numbers: AnswerNumbers
    """Of the last answer."""

    def say(self, text: str, sampling: ChatSampling) -> Generator[str, None, None]:
        """Pieces of the answer as they come; closing it early ends the answer and keeps what was
        said. Raises BackendError, with nothing changed."""
        ...

    def take_back(self) -> str | None:
        """Forget the last turn; returns what the user said, None if there is none."""
        ...

    def fork(self) -> ChatSession: ...

    def close(self) -> None: ...


class Backend(Protocol):
    """An engine or a server."""

    def greeting(self) -> list[str]:
        """Lines that say what answers."""
        ...

    def session(self, system: str) -> ChatSession:
        """A new conversation."""
        ...

    def memory(self, width: int) -> list[RenderableType]:
        """The memory map. Raises BackendError if it cannot be seen."""
        ...

    def stats(self) -> list[str]:
        """Numbers of the memory manager. Raises BackendError if they cannot be seen."""
        ...

    def close(self) -> None: ...
