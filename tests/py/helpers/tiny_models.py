"""Tiny randomly initialised models, and what transformers' own `generate` says for them.

Weights are drawn wide, so that greedy outputs vary instead of repeating one token.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers as tf

torch.set_num_threads(1)

VOCAB_SIZE = 128
MAX_POSITIONS = 256

TINY: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_WIDE = {**TINY, "initializer_range": 0.4}
_GQA = {**TINY, "num_key_value_heads": 2}
_SHALLOW = {**TINY, "num_hidden_layers": 2}

CONFIGS: dict[str, Any] = {
    "llama": lambda: tf.LlamaConfig(**_GQA),
    "qwen2": lambda: tf.Qwen2Config(**_GQA),
    "qwen3": lambda: tf.Qwen3Config(**_GQA, head_dim=32),
    "mistral": lambda: tf.MistralConfig(**_GQA, sliding_window=16),
    "gemma2": lambda: tf.Gemma2Config(
        **_GQA,
        head_dim=16,
        sliding_window=16,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=30.0,
        tie_word_embeddings=False,
        # transformers 5.17 drops the soft cap under SDPA; eager is right in every version.
        attn_implementation="eager",
    ),
    "gemma3": lambda: tf.Gemma3TextConfig(
        **_GQA, head_dim=16, sliding_window=16, tie_word_embeddings=False
    ),
    "gpt_neox": lambda: tf.GPTNeoXConfig(**_WIDE),
    "phi": lambda: tf.PhiConfig(**_WIDE),
    "phi3": lambda: tf.Phi3Config(**_GQA),
    "gpt2": lambda: tf.GPT2Config(**_WIDE),
    "gpt_oss": lambda: tf.GptOssConfig(
        **{**_GQA, "num_local_experts": 4, "num_experts_per_tok": 2},
        head_dim=16,
        sliding_window=16,
        rope_scaling=None,
    ),
    "mixtral": lambda: tf.MixtralConfig(
        **_SHALLOW, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2
    ),
}
"""Architecture -> config; those that the project promises come first."""
MORE_CONFIGS: dict[str, Any] = {
    "cohere": lambda: tf.CohereConfig(**_SHALLOW, num_key_value_heads=2),
    "wide_mlp": lambda: tf.LlamaConfig(**{**_GQA, "intermediate_size": 128}),
    "four_kv_heads": lambda: tf.LlamaConfig(**_SHALLOW, num_key_value_heads=4),
    "tied": lambda: tf.Qwen2Config(
        # The vocabulary is no multiple of any number of ranks.
        **{**_SHALLOW, "vocab_size": 131},
        num_key_value_heads=1,
        tie_word_embeddings=True,
    ),
    "olmo": lambda: tf.OlmoConfig(**_GQA),
}
"""Those that only single tests ask for."""


def draw_model(config: Any, seed: int = 0) -> Any:
    """float32, in evaluation mode; wide biases and norms too, where the default is zero or one."""
    torch.manual_seed(seed)
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, held in model.state_dict().items():
            if name.endswith(("correction_bias", "expert_bias")):  # zeros
                held.normal_(0, 0.1)
    return model.eval()


def continue_prompt(
    model: Any, prompt: tuple[int, ...], max_new_tokens: int, use_cache: bool = True
) -> list[int]:
    """Greedy continuation of one prompt alone, by transformers."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        use_cache=use_cache,
    )
    continuation: list[int] = output[0, len(prompt) :].tolist()
    return continuation


@cache
def make_model(name: str, seed: int = 0) -> Any:
    """The model of this name in one of the tables. Not to be changed."""
    return draw_model((CONFIGS | MORE_CONFIGS)[name](), seed)


@cache
def reference(name: str, prompt: tuple[int, ...], max_new_tokens: int) -> list[int]:
    return continue_prompt(make_model(name), prompt, max_new_tokens)


def random_prompts(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]


CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


@cache
def make_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> Any:
    """Byte-level, few merges; <s> and </s> are special. Its vocabulary has 270 entries."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=270,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["user assistant system hello world"], trainer)
    fast = tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = chat_template
    return fast


def save_chat_model(folder: Any, chat_template: str | None = CHAT_TEMPLATE) -> str:
    """A Llama with a tokenizer in `folder`, as a user would have it on disk."""
    torch.manual_seed(0)
    settings = {**_GQA, "vocab_size": 270, "eos_token_id": 1}
    tf.LlamaForCausalLM(tf.LlamaConfig(**settings)).save_pretrained(folder)
    make_tokenizer(chat_template).save_pretrained(folder)
    return str(folder)
