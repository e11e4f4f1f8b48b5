"""Tiny GGUF files, and models with the numbers that they hold, by gguf's own functions.

gguf can make blocks of Q8_0, Q4_0, Q4_1, Q5_0 and Q5_1; those of others are drawn at random here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

Type = gguf.GGMLQuantizationType
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    "smollm3": "smollm3",
    "granite": "granite",
    "olmo2": "olmo2",
    "phi3": "phi3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}
"""transformers' model type -> llama.cpp's architecture."""
PAIRED = ("llama", "smollm3", "granite")
"""Of these llama.cpp rotates neighbours."""


FACTORS: dict[Type, dict[int, float]] = {
    Type.Q2_K: {80: 5e-3, 82: 8e-3},
    Type.Q3_K: {108: 2e-3},
    Type.Q4_K: {0: 1e-3, 2: 8e-3},
    Type.Q5_K: {0: 4e-4, 2: 8e-3},
    Type.Q6_K: {208: 2e-4},
    Type.IQ4_NL: {0: 4e-3},
    Type.IQ4_XS: {0: 2e-4},
}
"""Of types whose blocks are drawn: the bytes at which factors lie, and how large they are."""


def random_blocks(kind: Type, rows: int, columns: int, seed: int) -> np.ndarray[Any, Any]:
    """uint8 [rows, bytes] of one of FACTORS, whose numbers are around 0.2."""
    block_columns, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    count = rows * columns // block_columns
    blocks = generator.integers(0, 256, (count, block_bytes), dtype=np.uint8)
    factor = (generator.random((count, 1)) + 0.5).astype(np.float32)
    for place, size in FACTORS[kind].items():
        blocks[:, place : place + 2] = (factor * size).astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def quantise(weight: np.ndarray[Any, Any], kind: Type, seed: int) -> np.ndarray[Any, Any]:
    """Rows as the file has them."""
    if kind in FACTORS:
        return random_blocks(kind, *weight.shape, seed)
    return np.asarray(gguf.quants.quantize(weight, kind))


def paired_rows(array: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of each head in llama.cpp's order, which rotates neighbours."""
    shape = (heads, 2, len(array) // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(array.reshape(shape).swapaxes(1, 2).reshape(array.shape))


def add_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    add_of_some(writer, config)


def add_of_some(writer: gguf.GGUFWriter, config: Any) -> None:
    """What only some configs have, as llama.cpp's converter writes it."""
    if config.model_type in ("gemma2", "gemma3_text", "phi3", "gpt_oss"):
        writer.add_sliding_window(config.sliding_window or 0)
    for add, name in (
        (writer.add_attn_logit_softcapping, "attn_logit_softcapping"),
        (writer.add_final_logit_softcapping, "final_logit_softcapping"),
        (writer.add_attention_scale, "attention_multiplier"),
        (writer.add_embedding_scale, "embedding_multiplier"),
        (writer.add_residual_scale, "residual_multiplier"),
        (writer.add_logit_scale, "logits_scaling"),
    ):
        if getattr(config, name, None):
            add(getattr(config, name))
    rope = config.rope_parameters
    if rope.get("rope_type") in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        for name in ("beta_fast", "beta_slow"):
            if name in rope:
                getattr(writer, f"add_rope_scaling_yarn_{name}")(rope[name])
    if rope.get("partial_rotary_factor", 1) != 1:
        width = config.hidden_size // config.num_attention_heads
        writer.add_rope_dimension_count(int(width * rope["partial_rotary_factor"]))
    if rope.get("rope_type") == "longrope":
        writer.add_rope_scaling_attn_factors(rope["attention_factor"])
        for name in ("short", "long"):
            factors = np.array(rope[f"{name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)


def writer_of(
    path: Path, model: Any, extra: Mapping[str, Any] | None = None, **of_parts: Any
) -> gguf.GGUFWriter:
    """A file with what the config says. extra: keys of the architecture and float values.
    of_parts: how it is split, as gguf's writer has it."""
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, architecture, **of_parts)
    add_sizes(writer, config)
    if getattr(config, "num_experts_per_tok", None):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if architecture in ("qwen3moe", "gpt-oss"):
            width = getattr(config, "moe_intermediate_size", config.intermediate_size)
            writer.add_expert_feed_forward_length(width)
    for key, value in (extra or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f"{architecture}.{key}", value)
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_weights(writer: gguf.GGUFWriter, model: Any, type_of: Callable[[str], Type]) -> Any:
    """Write the model's weights; returns a copy of it with the numbers that were written. type_of:
    llama.cpp's name of a matrix -> its type."""
    config, written = model.config, copy.deepcopy(model)
    architecture = ARCHITECTURES[config.model_type]
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    state = written.state_dict()
    for seed, (name, tensor) in enumerate(state.items()):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if ".experts." in name:
            add_experts(writer, name, tensor, type_of, seed)
            continue
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own is not None
        own += "" if own.endswith((".weight", ".bias")) else ".weight"  # sinks
        kind = type_of(own) if tensor.dim() > 1 else Type.F32
        added = 1 if architecture.startswith("gemma") and "norm" in own else 0
        rows = quantise((tensor + added).numpy(), kind, seed)
        tensor.copy_(torch.from_numpy(gguf.quants.dequantize(rows, kind)) - added)
        if architecture in PAIRED and (".attn_q." in own or ".attn_k." in own):
            is_query = ".attn_q." in own
            heads = config.num_attention_heads if is_query else config.num_key_value_heads
            rows = paired_rows(rows, heads)
        writer.add_tensor(own, rows, raw_dtype=kind)
    return written


def add_experts(
    writer: gguf.GGUFWriter, name: str, tensor: Any, type_of: Callable[[str], Type], seed: int
) -> None:
    """Those of a layer: [experts, rows, columns], or biases [experts, rows], gates and factors
    apart. Sets the tensor's."""
    layer, ending = name.split(".")[2], "bias" if name.endswith("_bias") else "weight"
    for part, weights in expert_parts(name, tensor, writer.arch == "gpt-oss").items():
        own = f"blk.{layer}.ffn_{part}_exps.{ending}"
        kind = type_of(own) if ending == "weight" else Type.F32
        flat = weights.reshape(-1, weights.shape[-1]).numpy()
        rows = quantise(flat, kind, seed + 1000 * len(part))
        numbers = torch.from_numpy(gguf.quants.dequantize(rows, kind))
        weights.copy_(numbers.view(weights.shape))
        writer.add_tensor(own, rows.reshape(*weights.shape[:-1], -1), raw_dtype=kind)


def expert_parts(name: str, tensor: Any, is_gpt_oss: bool) -> dict[str, Any]:
    """Views of all experts' gates and factors, or of what outputs are made with."""
    if is_gpt_oss and tensor.dim() == 3:
        tensor = tensor.transpose(1, 2)
    if "down_proj" in name:
        return {"down": tensor}
    halves = (tensor[:, ::2], tensor[:, 1::2]) if is_gpt_oss else tensor.chunk(2, 1)
    return dict(zip(("gate", "up"), halves, strict=True))


def write_gguf(
    path: Path,
    model: Any,
    type_of: Callable[[str], Type],
    extra: Mapping[str, Any] | None = None,
) -> Any:
    """As `add_weights`, a whole file."""
    writer = writer_of(path, model, extra)
    written = add_weights(writer, model, type_of)
    finish(writer)
    return written


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Any) -> None:
    """A byte-level one, with its chat template."""
    import json

    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    special = set(tokenizer.all_special_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    kinds = [gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in tokens]
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)
