"""The byte-level BPE tokenizer of the tiny chat model and its chat template."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from dialogues import TRAIN, dialogue, messages
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

PAD, BEGIN, END = "<|pad|>", "<|begin|>", "<|end|>"
ROLES = {role: f"<|{role}|>" for role in ("system", "user", "assistant")}
SPECIAL = (PAD, BEGIN, END, *ROLES.values())

# Nothing but special tokens stands between messages, so a conversation's token ids are always
# a prefix of the token ids of the same conversation with more messages.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def _texts(count: int, seed: int) -> Iterator[str]:
    rng = random.Random(f"tokenizer {seed}")
    for _ in range(count):
        for message in messages(dialogue(rng, TRAIN)):
            yield message["content"]


def build_tokenizer(vocab_size: int = 1024, count: int = 8000, seed: int = 0) -> Tokenizer:
    """Train the tokenizer on training dialogues; every digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(count, seed), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": list(ROLES.values()),
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "padding_side": "left",
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
