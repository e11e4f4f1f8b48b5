"""LoadRequest and Outcome: one request of a load, and how it went. Times in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What is asked. `prompt` is text, or token ids for /v1/completions."""

    prompt: str | list[int]
    num_prompt_tokens: int
    """As far as is known before the server counts them."""
    num_output_tokens: int
    """Most tokens that are generated; with ignore_eos exactly so many."""


@dataclass(slots=True)
class Outcome:
    """How a request went. Times of `start_s` are those of the run's clock, 0 at its start."""

    start_s: float = 0.0
    issue_delay_s: float = 0.0
    """How much later than planned it was issued, by the load generator's own fault."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    first_token_s: float | None = None
    """From the start to the first piece of text."""
    inter_token_s: list[float] = field(default_factory=list)
    """Between two pieces of text; a server may put several tokens into one."""
    latency_s: float = 0.0
    text: str = ""
    error: str = ""
    """Why it failed; empty if it did not."""

    @property
    def is_success(self) -> bool:
        return not self.error

    @property
    def per_output_token_s(self) -> float | None:
        """Mean time per token after the first; None for fewer than two tokens."""
        if self.first_token_s is None or self.num_output_tokens < 2:
            return None
        return (self.latency_s - self.first_token_s) / (self.num_output_tokens - 1)
