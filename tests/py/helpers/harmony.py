"""A tiny model that has gpt-oss' chat template and the tokens of its form, with bytes otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as tf

from flexinfer.server.parsing.harmony import ENDS, IN_HEADER
from helpers.tiny_models import make_tokenizer

TEMPLATE = Path(__file__).parents[1] / "server" / "gpt_oss.jinja"
"""Of openai/gpt-oss-120b (Apache License 2.0), as llama.cpp has it in models/templates."""
MARKS = [*IN_HEADER, *ENDS]


def harmony_tokenizer() -> Any:
    tokenizer = make_tokenizer(TEMPLATE.read_text())
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS, "eos_token": "<|return|>"})
    return tokenizer


def save_harmony_model(folder: Path) -> str:
    """A Llama of random weights, as a user would have it on disk; it ends as gpt-oss does."""
    tokenizer = harmony_tokenizer()
    ends = tokenizer.convert_tokens_to_ids(["<|return|>", "<|endoftext|>", "<|call|>"])
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        eos_token_id=ends,
    )
    tf.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
