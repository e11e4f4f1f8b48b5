"""Random models of real shapes, their weights made on the device: nothing is read or fetched."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch


@dataclass(frozen=True)
class ModelShape:
    """A Llama architecture."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    max_positions: int = 32_768
    rope_theta: float = 500_000.0


SHAPES = {
    "llama-3-8b": ModelShape(4096, 14336, 32, 32, 8, 128_256),
    "yi-6b": ModelShape(4096, 11008, 32, 32, 4, 64_000, rope_theta=5_000_000.0),
    "llama-3.2-1b": ModelShape(2048, 8192, 16, 32, 8, 128_256),
    "toy": ModelShape(128, 256, 4, 4, 2, 1_000, max_positions=2_048),
}
"""The published shapes; "toy" is for trying the benchmarks on a CPU."""


def graph_sizes(sizes: tuple[int, ...]) -> dict[str, Any]:
    """The setting that limits CUDA graphs to these batch sizes, so that an engine opens quickly."""
    from flexinfer.config import EngineConfig

    name = "cuda_graph_sizes"
    return {name: sizes} if name in {field.name for field in fields(EngineConfig)} else {}


def make_model(name: str, device: str, dtype: torch.dtype) -> Any:
    """A transformers model of that shape with random weights, in evaluation mode."""
    import transformers

    transformers.logging.set_verbosity_error()
    shape = SHAPES[name]
    config = transformers.LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.max_positions,
        rope_theta=shape.rope_theta,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        dtype=dtype,
    )
    torch.manual_seed(0)
    # from_config initialises every weight, and under this context it does so on the device.
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval().requires_grad_(False)
