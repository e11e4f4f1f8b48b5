"""SamplingDefaults: what a request has for what it leaves out. Checked where they are made, so that
no request has to find out what is wrong with them.

Names of what is given are those of transformers' generation_config.json, meaning and precedence
those of vLLM's `--generation-config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flexinfer.runtime.numbers import positive
from flexinfer.sampling.params import SamplingParams

LENGTH = "max_new_tokens"
DRAWING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""SamplingParams has them under the same names."""
NAMES = (*DRAWING, LENGTH)


@dataclass(frozen=True, kw_only=True)
class SamplingDefaults:
    """Those that are not given stay SamplingParams' own, which are OpenAI's."""

    values: Mapping[str, float] = field(default_factory=dict)
    """How tokens are drawn, by the names of SamplingParams' fields."""
    max_tokens: int | None = None
    """Of an answer whose request names no length; None: the endpoint says."""
    max_tokens_limit: int | None = None
    """Of any answer of a server; None: the model's context alone bounds them."""

    @classmethod
    def of(cls, given: Mapping[str, Any], *, is_limit: bool) -> SamplingDefaults:
        """What is none of the known names is passed over, and so is what is None. `is_limit`:
        max_new_tokens bounds what requests ask for, too. Raises ValueError for any value that a
        request could not have."""
        known = {name: given[name] for name in DRAWING if given.get(name) is not None}
        plain = SamplingParams(**known)
        longest = given.get(LENGTH)
        if longest is not None:
            longest = positive(LENGTH, longest)
        return cls(
            values={name: getattr(plain, name) for name in known},
            max_tokens=longest,
            max_tokens_limit=longest if is_limit else None,
        )

    def params(self) -> SamplingParams:
        """Of a request that says nothing."""
        length = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        return SamplingParams(**self.values, **length)  # type: ignore[arg-type]

    def limited(self, max_tokens: int | None) -> int | None:
        """What a request asks for, within the server's limit; None: it says nothing."""
        if max_tokens is None or self.max_tokens_limit is None:
            return max_tokens
        return min(max_tokens, self.max_tokens_limit)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.values) or self.max_tokens is not None

    def __str__(self) -> str:
        said = [f"{name} {value:g}" for name, value in self.values.items()]
        if self.max_tokens is not None:
            said.append(f"max_tokens {self.max_tokens}")
        return ", ".join(said)
