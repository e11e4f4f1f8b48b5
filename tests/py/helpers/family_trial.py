"""Whether the engine serves an architecture of transformers, found out on a tiny model of it."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import torch

from flexinfer import LLM, SamplingParams, UnsupportedModelError
from flexinfer.models.checks import check_config
from helpers.every_architecture import own_config, tiny_class, tiny_config, tiny_model
from helpers.tiny_models import random_prompts

WORKS = "works"
KINDS = {
    WORKS: "^works$",
    "refused for KV": "indexes|_attention'|sliding window|tell its layer|passes '|dynamic",
    "refused for a state": "recurrent|state|'conv'|'hybrid|'mamba|of which",
    "refused: encoder-decoder": "encoder-decoder|several text models",
    "refused: attends in both directions": "both directions",
    "refused: does not use AttentionInterface": "AttentionInterface",
    "refused: takes no flat batch": "no flat batch",
    "refused: no causal model class": "no causal language model",
    "not tried": "^not tried",
}
"""What the page counts, and how a verdict of it reads."""
NUM_NEW = 8


def try_family(model_type: str) -> str:
    """`WORKS`, or why not."""
    try:
        check_config(own_config(model_type))
        tiny = tiny_config(model_type)
        check_config(tiny, tiny_class(model_type, tiny))
    except UnsupportedModelError as error:
        return f"refused: {error}"
    except Exception as error:
        if "Validation" not in type(error).__name__:
            raise
        return "not tried: its own defaults make no config"
    model = tiny_model(model_type)
    if model is None:
        return "not tried: it cannot be made small"
    model.generation_config.eos_token_id = None
    prompts = random_prompts((5, 70, 20, 1))
    try:
        answers = serve(model, prompts)
    except UnsupportedModelError as error:
        return f"refused: {error}"
    return WORKS if answers == [reference(model, prompt) for prompt in prompts] else "differs"


def kind_of(verdict: str) -> str:
    """Which of KINDS; a state is named first, by the layer that keeps it."""
    if "'linear_attention'" in verdict:
        return "refused for a state"
    for kind, pattern in KINDS.items():
        if re.search(pattern, verdict):
            return kind
    raise ValueError(f"a verdict of no kind, to be added to KINDS: {verdict}")


def count_sentences(counts: Counter[str], version: str) -> str:
    """What the page says above its table."""
    total = sum(counts.values())
    for_what_they_keep = counts["refused for KV"] + counts["refused for a state"]
    others = total - counts[WORKS] - for_what_they_keep - counts["not tried"]
    return (
        f"{counts[WORKS]} of {total} work, by transformers {version}. {others} are refused for "
        f"another reason than what\nthey keep of a sequence, and {for_what_they_keep} for that: "
        "KV of a kind that is not known, or a state.\n"
    )


def serve(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy, all at once, prompts in parts."""
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    with LLM(
        model,
        max_num_seqs=4,
        max_num_batched_tokens=48,
        max_model_len=128,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=64 << 20,
    ) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def reference(model: Any, prompt: list[int]) -> list[int]:
    """Greedy, alone, by transformers."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_NEW,
        do_sample=False,
        pad_token_id=0,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens
