"""What transformers answers with the model that a GGUF file has, as `mixtures.generate` does with
the file."""

from __future__ import annotations

from typing import Any

from helpers.mixtures import NUM_TOKENS
from helpers.tiny_models import continue_prompt


def expected(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    return [continue_prompt(model, tuple(prompt), NUM_TOKENS) for prompt in prompts]
