"""The models that are measured: Llama architecture, random weights, no tokenizer; and the same with
weights and inputs of 8 bits, as llm-compressor writes them."""

from __future__ import annotations

import json
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
    "600m": {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
}
"""600m: the shape of Qwen3 0.6B."""

WEIGHTS = ("plain", "w8a8")
BYTES = {"num_bits": 8, "type": "int", "symmetric": True}
W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**BYTES, "strategy": "channel", "dynamic": False},
            "input_activations": {**BYTES, "strategy": "token", "dynamic": True},
        }
    },
}
"""A scale for each output of a weight and for each token of its inputs; the head stays."""


def make_model(folder: Path, size: str, weights: str = "plain") -> Path:
    """The folder of the model, made if it is missing; weights: one of WEIGHTS."""
    return _make_plain(folder, size) if weights == "plain" else _make_w8a8(folder, size)


def _make_plain(folder: Path, size: str) -> Path:
    path = folder / size
    if (path / "model.safetensors").exists():
        return path
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB_SIZE, "tie_word_embeddings": False, **SIZES[size]}
    config = LlamaConfig(
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
        initializer_range=0.05,
        **sizes,
    )
    LlamaForCausalLM(config).float().save_pretrained(path)
    return path


def _make_w8a8(folder: Path, size: str) -> Path:
    """The plain model's weights, rounded."""
    path = folder / f"{size}-w8a8"
    if (path / "model.safetensors").exists():
        return path
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig

    plain = _make_plain(folder, size)
    tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor.bfloat16()
            continue
        scales = (tensor.abs().amax(dim=1, keepdim=True) / 127).bfloat16()
        rounded = (tensor / scales.float()).round().clamp(-128, 127)
        tensors[name] = rounded.to(torch.int8)
        tensors[f"{name}_scale"] = scales
    AutoConfig.from_pretrained(plain, dtype=torch.bfloat16).save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": W8A8}, indent=2))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path
