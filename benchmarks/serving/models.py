"""The models that are measured: Llama architecture, random weights, no tokenizer."""

from __future__ import annotations

from pathlib import Path

from workloads import VOCAB_SIZE

SIZES = {
    "tiny": {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
    },
    "small": {
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 1408,
    },
    "small-128k": {
        "vocab_size": 131_072,
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 1408,
    },
    "big": {
        "hidden_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 2816,
    },
}


def make_model(folder: Path, size: str) -> Path:
    """The folder of the model, made if it is missing."""
    path = folder / size
    if (path / "model.safetensors").exists():
        return path
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB_SIZE, **SIZES[size]}
    config = LlamaConfig(
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
        initializer_range=0.05,
        **sizes,
    )
    LlamaForCausalLM(config).float().save_pretrained(path)
    return path
