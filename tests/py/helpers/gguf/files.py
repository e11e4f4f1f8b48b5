"""Tiny GGUF files, and models with the numbers that they hold, by gguf's own functions.

gguf can make blocks of Q8_0, Q4_0, Q4_1, Q5_0 and Q5_1; those of others are drawn at random here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from helpers.gguf.form import Moved
from helpers.gguf.forms import form_of

Type = gguf.GGMLQuantizationType
FACTORS: dict[Type, dict[int, float]] = {
    Type.Q2_K: {80: 5e-3, 82: 8e-3},
    Type.Q3_K: {108: 2e-3},
    Type.Q4_K: {0: 1e-3, 2: 8e-3},
    Type.Q5_K: {0: 4e-4, 2: 8e-3},
    Type.Q6_K: {208: 2e-4},
    Type.IQ4_NL: {0: 4e-3},
    Type.IQ4_XS: {0: 2e-4},
    Type.IQ3_S: {0: 2e-3},
    Type.IQ3_XXS: {0: 4e-3},
    Type.IQ2_S: {0: 1e-2},
    Type.IQ2_XS: {0: 1e-2},
    Type.IQ2_XXS: {0: 1e-2},
    Type.IQ1_S: {0: 4e-2},
    Type.IQ1_M: {},
    Type.TQ1_0: {52: 3e-1},
    Type.TQ2_0: {64: 3e-1},
}
"""Of types whose blocks are drawn: the bytes at which factors lie, and how large they are."""
TORN_FACTORS = {Type.IQ1_M: 4e-2}
"""Of types whose factor lies in the upper halves of every second byte of the last eight."""

UNQUANTISED = ("shortconv.conv.", "conv1d", "ssm_norm.", "altup", "laurel")
"""Parts of the names of matrices that llama-quantize leaves as they are."""


def random_blocks(
    kind: Type, rows: int, columns: int, seed: int, size: float = 0
) -> np.ndarray[Any, Any]:
    """uint8 [rows, bytes] of one of FACTORS, whose numbers are around 0.2. size: of all factors
    instead, of any type but MXFP4."""
    block_columns, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    count = rows * columns // block_columns
    blocks = generator.integers(0, 256, (count, block_bytes), dtype=np.uint8)
    factor = (generator.random((count, 1)) + 0.5).astype(np.float32)
    for place, usual in FACTORS[kind].items():
        blocks[:, place : place + 2] = (factor * (size or usual)).astype(np.float16).view(np.uint8)
    if kind in TORN_FACTORS:
        halves = (factor * (size or TORN_FACTORS[kind])).astype(np.float16).view(np.uint16)
        nibbles = (halves >> np.array([0, 4, 8, 12], np.uint16) & 15).astype(np.uint8)
        blocks[:, -7::2] = blocks[:, -7::2] & 15 | nibbles << 4
    return blocks.reshape(rows, -1)


def quantise(weight: np.ndarray[Any, Any], kind: Type, seed: int) -> np.ndarray[Any, Any]:
    """Rows as the file has them."""
    if kind in FACTORS:
        return random_blocks(kind, *weight.shape, seed)
    return np.asarray(gguf.quants.quantize(weight, kind))


def add_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    if hasattr(config, "intermediate_size"):
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    # Of models whose layers differ, configs ask for it layer by layer.
    writer.add_head_count_kv(vars(config)["num_key_value_heads"])
    writer.add_key_length(head_dim_of(config))
    writer.add_value_length(head_dim_of(config))
    add_epsilon(writer, config)
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": 1e4}
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    add_of_some(writer, config)


def head_dim_of(config: Any) -> int:
    # Of models whose layers differ, configs ask for it layer by layer.
    return vars(config).get("head_dim") or config.hidden_size // config.num_attention_heads


def add_epsilon(writer: gguf.GGUFWriter, config: Any) -> None:
    of_rms = ["rms_norm_eps", "layer_norm_epsilon"]
    of_rms += ["norm_eps"] * config.model_type.startswith("lfm2")
    for name in ("layer_norm_eps", "norm_epsilon", "norm_eps", *of_rms):
        if hasattr(config, name):
            add = writer.add_layer_norm_rms_eps if name in of_rms else writer.add_layer_norm_eps
            writer.kv_data[0].pop(f"{writer.arch}.attention.layer_norm_rms_epsilon", None)
            add(getattr(config, name))


def add_of_some(writer: gguf.GGUFWriter, config: Any) -> None:
    """What only some configs have, as llama.cpp's converter writes it."""
    for add, name in (
        (writer.add_attn_logit_softcapping, "attn_logit_softcapping"),
        (writer.add_final_logit_softcapping, "final_logit_softcapping"),
        (writer.add_attention_scale, "attention_multiplier"),
        (writer.add_embedding_scale, "embedding_multiplier"),
        (writer.add_residual_scale, "residual_multiplier"),
        (writer.add_logit_scale, "logits_scaling"),
        (writer.add_logit_scale, "logit_scale"),
    ):
        if getattr(config, name, None):
            add(getattr(config, name))
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if rope.get("rope_type") in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        for name in ("beta_fast", "beta_slow"):
            if name in rope:
                getattr(writer, f"add_rope_scaling_yarn_{name}")(rope[name])
        if "attention_factor" in rope:
            writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
    if rope.get("partial_rotary_factor", 1) != 1:
        rotated = head_dim_of(config) * rope["partial_rotary_factor"]
        writer.add_rope_dimension_count(int(rotated))
    if rope.get("rope_type") == "longrope":
        writer.add_rope_scaling_attn_factors(rope["attention_factor"])
        for name in ("short", "long"):
            factors = np.array(rope[f"{name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)


def count_of_experts(config: Any) -> int:
    names = ("num_local_experts", "num_experts", "moe_num_experts")
    return next(getattr(config, name) for name in names if hasattr(config, name))


def writer_of(
    path: Path, model: Any, extra: Mapping[str, Any] | None = None, **of_parts: Any
) -> gguf.GGUFWriter:
    """A file with what the config says. extra: keys of the architecture and float values.
    of_parts: how it is split, as gguf's writer has it."""
    config = model.config
    form = form_of(config)
    writer = gguf.GGUFWriter(path, form.architecture, **of_parts)
    add_sizes(writer, config)
    if getattr(config, "num_experts_per_tok", None):
        writer.add_expert_count(count_of_experts(config))
        writer.add_expert_used_count(config.num_experts_per_tok)
    form.add_keys(writer, config)
    for key, value in (extra or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f"{form.architecture}.{key}", value)
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
    form = form_of(config)
    for seed, (name, tensor) in enumerate(written.state_dict().items()):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for own, part in form.parts_of(name, tensor, config).items():
            numbers = part.read() if isinstance(part, Moved) else part
            is_matrix = numbers.dim() > 1 and own.endswith(".weight")
            is_left = any(part in own for part in UNQUANTISED)
            kind = type_of(own) if is_matrix and not is_left else Type.F32
            add_part(writer, own, numbers, kind, seed + 1000 * len(own))
            if isinstance(part, Moved):
                part.write(numbers)
    for own, whole in form.stacked(written.state_dict()).items():
        writer.add_tensor(own, whole.numpy())
    return written


def add_part(
    writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, kind: Type, seed: int
) -> None:
    """Write it, and set it to the numbers that were written. Of a view whose rows are in another
    order the file has a matrix or vector of them."""
    numbers = tensor.numpy()
    if tensor.dim() > 3:
        numbers = numbers.reshape(-1, tensor.shape[-1])
    elif tensor.dim() > 2 and name.endswith(".bias"):
        numbers = numbers.reshape(-1)
    rows = quantise(numbers.reshape(-1, numbers.shape[-1]), kind, seed)
    tensor.copy_(torch.from_numpy(gguf.quants.dequantize(rows, kind)).view(tensor.shape))
    writer.add_tensor(name, rows.reshape(*numbers.shape[:-1], -1), raw_dtype=kind)


@contextmanager
def writing(
    path: Path,
    model: Any,
    type_of: Callable[[str], Type],
    extra: Mapping[str, Any] | None = None,
) -> Iterator[tuple[gguf.GGUFWriter, Any]]:
    """As `add_weights`, a whole file, which has what is done to its writer meanwhile, too."""
    writer = writer_of(path, model, extra)
    yield writer, add_weights(writer, model, type_of)
    finish(writer)


def write_gguf(
    path: Path,
    model: Any,
    type_of: Callable[[str], Type],
    extra: Mapping[str, Any] | None = None,
) -> Any:
    """As `add_weights`, a whole file."""
    with writing(path, model, type_of, extra) as (_, written):
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
