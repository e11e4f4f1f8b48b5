"""SpeculativeConfig: how tokens are proposed ahead; frozen, checked where it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flexinfer.runtime.json_options import from_mapping, require_choice
from flexinfer.runtime.numbers import positive

SPECULATIVE_METHODS = ("ngram", "draft_model")
MAX_SPECULATIVE_TOKENS = 256
"""Each place in a proposal is counted in a metric, and all are weighed before each step."""
DEFAULT_LOOKUP, MAX_LOOKUP = 5, 32
"""Each length between the shortest and the longest has an index of all tokens of a request."""


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Tokens proposed ahead and verified in one step; names are those of vLLM's
    `speculative_config`."""

    method: str
    """"ngram": what followed the last tokens where they stood before, in prompt or output;
    "draft_model": what a smaller model finds most probable (on the CPU)."""
    num_speculative_tokens: int
    """The longest proposal; how much of it is verified adapts to what it brings."""
    prompt_lookup_max: int | None = None
    """The longest tail that is looked up, at most 32; None: `prompt_lookup_min`, or 5."""
    prompt_lookup_min: int | None = None
    """The shortest; None: `prompt_lookup_max`."""
    model: Any = None
    """The draft model, with the same vocabulary: a local folder, a hub id, or a loaded model."""

    def __post_init__(self) -> None:
        require_choice("speculative_config: method", self.method, SPECULATIVE_METHODS)
        name = "speculative_config: num_speculative_tokens"
        positive(name, self.num_speculative_tokens, MAX_SPECULATIVE_TOKENS)
        for name, length in self._given_lengths().items():
            positive(f"speculative_config: {name}", length, MAX_LOOKUP)
        self._check_model()
        shortest, longest = self.lookup_lengths
        if shortest > longest:
            raise ValueError(
                f"speculative_config: prompt_lookup_min ({self.prompt_lookup_min}) must be at most "
                f"prompt_lookup_max ({self.prompt_lookup_max})"
            )

    def _given_lengths(self) -> dict[str, int]:
        lengths = {name: getattr(self, name) for name in ("prompt_lookup_min", "prompt_lookup_max")}
        return {name: length for name, length in lengths.items() if length is not None}

    def _check_model(self) -> None:
        if self.method == "ngram" and self.model is not None:
            raise ValueError('speculative_config: method "ngram" takes no model')
        if self.method == "draft_model":
            if self.model is None:
                raise ValueError('speculative_config: method "draft_model" needs a model')
            if given := self._given_lengths():
                raise ValueError(
                    f'speculative_config: method "draft_model" takes no {" and no ".join(given)}'
                )

    @property
    def lookup_lengths(self) -> tuple[int, int]:
        """The shortest and the longest tail that is looked up."""
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        return shortest or longest or DEFAULT_LOOKUP, longest or shortest or DEFAULT_LOOKUP

    @classmethod
    def parse(cls, given: Any) -> SpeculativeConfig:
        """From a mapping or its JSON. Raises ValueError, naming what is wrong with it."""
        return from_mapping(cls, "speculative_config", given, method=SPECULATIVE_METHODS)
