"""GGUF files of a folder's model: with the same numbers, and quantised by llama.cpp."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ARCHITECTURES = {"llama": "llama", "qwen3_moe": "qwen3moe"}
"""transformers' model types -> llama.cpp's names."""


def make_files(folder: Path, options: Mapping[str, Sequence[str]], llama_bin: Path) -> None:
    """A file of each type, those that are missing. options: llama-quantize's, by type."""
    plain = folder / "BF16.gguf"
    for kind, more in options.items():
        target = folder / f"{kind}.gguf"
        if target.exists():
            continue
        if not plain.exists():
            write_gguf(folder, plain)
        command = [llama_bin / "llama-quantize", *more, plain, target, kind, "2"]
        subprocess.run(command, check=True, capture_output=True)
    plain.unlink(missing_ok=True)


def write_gguf(folder: Path, target: Path) -> None:
    import gguf
    import numpy as np
    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    writer = gguf.GGUFWriter(target, ARCHITECTURES[config.model_type])
    _add_sizes(writer, config)
    add_tokenizer(writer, config.vocab_size)
    for name, tensor in _tensors(folder, config):
        if tensor.dim() == 1 or "ffn_gate_inp" in name:
            writer.add_tensor(name, tensor.float().numpy())
        else:
            rows = tensor.contiguous().view(torch.uint16).numpy().view(np.uint8)
            writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: Any, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.model_type == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)


def _tensors(folder: Path, config: Any) -> Iterator[tuple[str, Any]]:
    """By the file's names; the experts of a layer are one."""
    import gguf
    import torch
    from safetensors import safe_open

    own = ARCHITECTURES[config.model_type]
    architecture = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == own)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            if ".experts." in name:
                continue
            tensor = file.get_tensor(name)
            name = names.get_name(name, try_suffixes=(".weight",))
            count = heads.get(name.split(".")[-2])
            if own == "llama" and count is not None:  # llama.cpp rotates neighbours
                tensor = tensor.view(count, 2, -1, tensor.shape[1]).transpose(1, 2)
                tensor = tensor.reshape(-1, tensor.shape[-1])
            yield name, tensor
        for layer in range(config.num_hidden_layers if own == "qwen3moe" else 0):
            path = f"model.layers.{layer}.mlp.experts"
            for part in ("gate", "up", "down"):
                parts = [f"{path}.{i}.{part}_proj.weight" for i in range(config.num_experts)]
                experts = torch.stack([file.get_tensor(one) for one in parts])
                yield f"blk.{layer}.ffn_{part}_exps.weight", experts


def add_tokenizer(writer: Any, vocab_size: int) -> None:
    """Byte-level, with words of no meaning: prompts are token ids."""
    from tokenizers.pre_tokenizers import ByteLevel

    special = ["<unk>", "<s>", "</s>", "<pad>"]
    tokens = [*special, *sorted(ByteLevel.alphabet()), "aa"]
    tokens += [f"word{i}" for i in range(vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(special) + [1] * (vocab_size - len(special)))
    writer.add_token_merges(["a a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
