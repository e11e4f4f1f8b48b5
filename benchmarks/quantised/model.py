"""The models that are compared, of known shapes and random weights: each as a folder for FlexInfer
and as GGUF files for llama.cpp, with the same numbers before quantisation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gguf_files import make_files
from gpt_oss import write_gpt_oss

VOCAB_SIZE = 32_000
SHAPES: dict[str, dict[str, Any]] = {
    "600m": {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "head_dim": 128,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "1b": {"hidden_size": 2048, "num_hidden_layers": 16},
    "3b": {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24},
    "7b": {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14_336},
}
"""Qwen3 0.6B, Llama 3.2 1B and 3B, Mistral 7B, where they differ from one another. The first has
its own vocabulary and a head that is tied to the embedding, the others a small one and a head
apart."""
AT_LOAD = {"int8": "Q8_0", "int4": "Q4_0", "int4-a8": "Q4_0"}
FILES = ("Q8_0", "Q4_0", "Q4_K_M", "Q6_K", "Q5_K_M", "Q3_K_M", "Q2_K", "IQ4_XS")
OWN_FILES = {"gpt-oss-20b": "MXFP4"}
"""Further shapes, of which there is one type of file and no folder (gpt_oss.py)."""
KINDS = AT_LOAD | {
    f"{kind}{inputs}": kind for kind in (*FILES, *OWN_FILES.values()) for inputs in ("", "-a8")
}
"""Our way to quantise -> llama.cpp's: at load, or as a file of llama.cpp's is, with inputs as they
are or of 8 bits."""


def folder_of(folder: Path, shape: str, num_layers: int | None) -> Path:
    return folder / (shape if num_layers is None else f"{shape}-layers-{num_layers}")


def make_folder(folder: Path, shape: str, num_layers: int | None) -> Path:
    """The model for FlexInfer, made if it is missing."""
    path = folder_of(folder, shape, num_layers)
    if not (path / "model.safetensors").exists():
        _draw(shape, num_layers).save_pretrained(path, max_shard_size="100GB")
    return path


def opened_as(folder: Path, way: str) -> tuple[Path, str]:
    """What FlexInfer loads, and its `quantization`."""
    if way in AT_LOAD:
        return folder, way
    return folder / f"{KINDS[way]}.gguf", "a8" if way.endswith("-a8") else "auto"


def make_model(
    folder: Path, shape: str, num_layers: int | None, ways: Sequence[str], llama_bin: Path
) -> Path:
    """The folder with the model in it, and a GGUF file for each way; what is missing is made.
    Raises ValueError for ways that are not of files that the shape has."""
    own = OWN_FILES.get(shape)
    if any((KINDS[way] == own) != (own is not None) for way in ways):
        raise ValueError(f"{shape} has files of {own or 'all types but MXFP4'}, got {ways}")
    if own is not None:
        path = folder_of(folder, shape, num_layers)
        if not (path / f"{own}.gguf").exists():
            path.mkdir(parents=True, exist_ok=True)
            write_gpt_oss(path / f"{own}.gguf", num_layers)
        return path
    path = make_folder(folder, shape, num_layers)
    # As ours: the head has 8 bits, tied or not. Files that ours reads are as they are.
    heads = ("--output-tensor-type", "q8_0", "--token-embedding-type", "q8_0")
    kinds = [KINDS[way] for way in ways]
    options = {kind: heads if kind in AT_LOAD.values() else () for kind in kinds}
    make_files(path, options, llama_bin)
    return path


def _draw(shape: str, num_layers: int | None) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
    } | SHAPES[shape]
    if num_layers is not None:
        settings["num_hidden_layers"] = num_layers
    config = LlamaConfig(**settings)
    return draw_weights(LlamaForCausalLM, config)


def draw_weights(model_class: Any, config: Any) -> Any:
    """A model in bfloat16 with random weights."""
    import torch

    with torch.device("meta"):
        model = model_class(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    model.tie_weights()
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.02)
        else:
            parameter.data.fill_(1)
    return model
