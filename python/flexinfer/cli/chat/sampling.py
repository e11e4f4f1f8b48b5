"""ChatSampling: what `flexinfer chat` is told of how answers are drawn, and what it leaves open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexinfer.sampling.params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class ChatSampling:
    """None: nothing was said, and whoever answers has a default."""

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for numbers out of range."""
        self.params()

    @property
    def given(self) -> dict[str, Any]:
        """By name, without those that were left open."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def filled(self, defaults: Mapping[str, Any]) -> ChatSampling:
        """With these for what was left open."""
        return replace(self, **{**defaults, **self.given})

    def params(self) -> SamplingParams:
        from flexinfer.sampling.params import SamplingParams

        return SamplingParams(**self.given)
