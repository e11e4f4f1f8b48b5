"""What the engine answers with a GGUF file, and transformers with the model that it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexinfer import LLM, SamplingParams
from helpers.tiny_models import continue_prompt

PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


def generate(path: Path, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    settings = {"dtype": "float32", "skip_tokenizer_init": True, **settings}
    with LLM(str(path), **settings) as llm:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, PARAMS, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def expected(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    return [continue_prompt(model, tuple(prompt), 10) for prompt in prompts]
