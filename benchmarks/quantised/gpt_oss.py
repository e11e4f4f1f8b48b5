"""A GGUF file of gpt-oss 20b's shape and random weights, as its own files are: experts in MXFP4,
all else of Q8_0 or float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

NUM_LAYERS = 24
WIDTH = 2880
NUM_EXPERTS = 32
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 64, 8, 64
VOCAB_SIZE = 201_088

Shape = tuple[int, ...]


def write_gpt_oss(target: Path, num_layers: int | None) -> None:
    """12 GB with all layers, which are drawn and written one after the other."""
    import gguf
    import numpy as np

    count = NUM_LAYERS if num_layers is None else num_layers
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(target, "gpt-oss")
    _add_settings(writer, count)
    types = gguf.GGMLQuantizationType
    tensors = list(_tensors(count))
    for name, shape, kind in tensors:
        dtype = np.dtype(np.float32) if kind == "F32" else np.dtype(np.uint8)
        stored = shape if kind == "F32" else (*shape[:-1], shape[-1] // 32 * BLOCK_BYTES[kind])
        num_bytes = dtype.itemsize * int(np.prod(stored))
        writer.add_tensor_info(name, stored, dtype, num_bytes, raw_dtype=types[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, shape, kind in tensors:
        writer.write_tensor_data(_draw(rng, shape, kind))
    writer.close()


def _add_settings(writer: Any, num_layers: int) -> None:
    import gguf
    from gguf_files import add_tokenizer

    writer.add_block_count(num_layers)
    writer.add_context_length(131_072)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(WIDTH)
    writer.add_expert_feed_forward_length(WIDTH)
    writer.add_expert_count(NUM_EXPERTS)
    writer.add_expert_used_count(4)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_sliding_window(128)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(150_000)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(32)
    writer.add_rope_scaling_orig_ctx_len(4096)
    add_tokenizer(writer, VOCAB_SIZE)


def _tensors(num_layers: int) -> Iterator[tuple[str, Shape, str]]:
    """Names, shapes and types, as llama.cpp's converter has them."""
    yield "token_embd.weight", (VOCAB_SIZE, WIDTH), "Q8_0"
    yield "output.weight", (VOCAB_SIZE, WIDTH), "Q8_0"
    yield "output_norm.weight", (WIDTH,), "F32"
    queries, keys = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    products = {"q": (queries, WIDTH), "k": (keys, WIDTH), "v": (keys, WIDTH)}
    products["output"] = (WIDTH, queries)
    for layer in range(num_layers):
        block = f"blk.{layer}"
        yield f"{block}.attn_norm.weight", (WIDTH,), "F32"
        for part, shape in products.items():
            yield f"{block}.attn_{part}.weight", shape, "Q8_0"
            yield f"{block}.attn_{part}.bias", shape[:1], "F32"
        yield f"{block}.attn_sinks.weight", (NUM_HEADS,), "F32"
        yield f"{block}.post_attention_norm.weight", (WIDTH,), "F32"
        yield f"{block}.ffn_gate_inp.weight", (NUM_EXPERTS, WIDTH), "F32"
        yield f"{block}.ffn_gate_inp.bias", (NUM_EXPERTS,), "F32"
        for part in ("gate", "up", "down"):
            yield f"{block}.ffn_{part}_exps.weight", (NUM_EXPERTS, WIDTH, WIDTH), "MXFP4"
            yield f"{block}.ffn_{part}_exps.bias", (NUM_EXPERTS, WIDTH), "F32"


BLOCK_BYTES = {"Q8_0": 34, "MXFP4": 17}
"""Of 32 numbers with their scale."""


def _draw(rng: Any, shape: Shape, kind: str) -> Any:
    """Numbers of a standard deviation of 0.02, as bytes of blocks; norms around 1."""
    import numpy as np

    if kind == "F32":
        centre = 1 if len(shape) == 1 and shape[0] == WIDTH else 0
        return (centre + rng.normal(0, 0.02, shape)).astype(np.float32)
    blocks = (*shape[:-1], shape[-1] // 32)
    numbers = rng.integers(0, 256, (*blocks, BLOCK_BYTES[kind]), dtype=np.uint8)
    if kind == "MXFP4":
        numbers[..., 0] = 119 + (numbers[..., 0] & 1)  # a byte that is a power of two
    else:
        scale = np.float16(0.02 / 74)
        numbers[..., :2] = np.frombuffer(scale.tobytes(), dtype=np.uint8)
    return numbers.reshape(*shape[:-1], -1)
