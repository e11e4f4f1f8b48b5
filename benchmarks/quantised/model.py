"""The models that are compared, of known shapes and random weights: each as a folder for FlexInfer
and as GGUF files for llama.cpp, with the same numbers before quantisation."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    plain = path / "BF16.gguf"
    for kind in [KINDS[way] for way in ways]:
        quantised = path / f"{kind}.gguf"
        if not quantised.exists():
            if not plain.exists():
                write_gguf(path, plain)
            # As ours: the head has 8 bits, tied or not. Files that ours reads are as they are.
            heads = ["--output-tensor-type", "q8_0", "--token-embedding-type", "q8_0"]
            options = heads if kind in AT_LOAD.values() else []
            command = [llama_bin / "llama-quantize", *options, plain, quantised, kind, "2"]
            subprocess.run(command, check=True, capture_output=True)
    plain.unlink(missing_ok=True)
    return path


def _draw(shape: str, num_layers: int | None) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
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
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    model.tie_weights()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.02)
        else:
            parameter.data.fill_(1)
    return model


def write_gguf(folder: Path, target: Path) -> None:
    import gguf
    import numpy as np
    import torch
    from safetensors import safe_open
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    writer = gguf.GGUFWriter(target, "llama")
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
    add_tokenizer(writer, config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            own = names.get_name(name, try_suffixes=(".weight",))
            tensor = file.get_tensor(name)
            for part, count in heads.items():
                if f".{part}." in own:  # llama.cpp rotates neighbours
                    tensor = tensor.view(count, 2, -1, tensor.shape[1]).transpose(1, 2)
                    tensor = tensor.reshape(-1, tensor.shape[-1])
            if tensor.dim() == 1:
                writer.add_tensor(own, tensor.float().numpy())
            else:
                rows = tensor.contiguous().view(torch.uint16).numpy().view(np.uint8)
                writer.add_tensor(own, rows, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
