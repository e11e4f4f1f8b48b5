"""The config that a GGUF file describes, for the architectures that are known here.

A key that is not known is refused by name: most change what the model computes. Source:
docs/gguf.md and gguf/constants.py of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flexinfer.checkpoints.gguf.architecture import BLOCK, Architecture
from flexinfer.checkpoints.gguf.architectures import architecture_of
from flexinfer.checkpoints.gguf.header import GgufHeader
from flexinfer.checkpoints.gguf.rope import BETAS, YARN_SCORE_FACTOR, rope_of
from flexinfer.checkpoints.gguf.values import GgufValues
from flexinfer.errors import UnsupportedModelError

ROPE_FACTORS = "rope_freqs.weight"
"""By what the frequencies of the rotary embedding are divided (Llama 3)."""
SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
}
"""Keys that must be there -> names of the config."""
OTHER_KEYS = {
    "block_count",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "expert_count",
    "expert_feed_forward_length",
    "expert_used_count",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    *BETAS,
    YARN_SCORE_FACTOR,
    "vocab_size",
}


ONLY = {"attention.causal": True, "expert_weights_norm": True, "pooling_type": 0}
"""Keys of which one value is known: that of models that generate text, and of those read here."""
HARMLESS = "tensor_data_layout"
"""Says how a converter found the rows, which in the file lie as in others."""
BIASES = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_gate.bias"}
"""Flags of a config -> the tensor that tells."""
UNSAID_IDS = {"bos": 1, "eos": 2, "unknown": 0}
"""Special tokens of SentencePiece where the file does not name them, as llama.cpp takes them."""


def config_of(header: GgufHeader) -> Any:
    """The transformers config. Raises UnsupportedModelError for what a file says and it cannot."""
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    architecture = architecture_of(header)
    values = GgufValues(header)
    values.refuse_unknown({*SIZES, *OTHER_KEYS, *ONLY, HARMLESS, *architecture.keys})
    for key in ONLY.keys() - architecture.keys:
        wanted = ONLY[key]
        if values.get(key, wanted) != wanted:
            values.refuse(key, f"only {wanted}")
    sizes = {key: name for key, name in SIZES.items() if key not in architecture.keys}
    settings: dict[str, Any] = {name: values.count(key) for key, name in sizes.items()}
    settings["num_hidden_layers"] = values.num_layers()
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise UnsupportedModelError(f"{header.path!r} has no tensor 'token_embd.weight'")
    vocab_size, width = embedding.shape[0], embedding.shape[-1]
    values.equal("vocab_size", vocab_size, "the rows of the embedding", default=vocab_size)
    values.equal("embedding_length", width, "the columns of the embedding")
    num_experts = values.get("expert_count", 0)
    own = architecture.experts_config if num_experts else architecture.config
    if own is None:
        known = "only models without experts" if num_experts else "only models with experts"
        values.refuse("expert_count", known)
    if own not in ("Qwen2Config", "Qwen2MoeConfig"):  # whose layers have the biases that they have
        settings |= {flag: True for flag, name in BIASES.items() if name in header.tensors}
    if num_experts:
        settings |= _experts(header, values, architecture)
    settings |= {
        "rope_parameters": rope_of(values),
        **_heads(header, values, architecture, width),
        **_norms(values, architecture),
        "vocab_size": vocab_size,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": _dtype(header),
        **_special_tokens(header, vocab_size),
    }
    blocks = {block[1] for name in header.tensors if (block := BLOCK.fullmatch(name))}
    if len(blocks) != settings["num_hidden_layers"]:  # without those for tokens beyond the next
        values.equal("block_count", len(blocks), "the number of blocks that have tensors")
    if callable(own):
        own = own(values)
    settings |= architecture.settings(values)
    make: Callable[..., Any] = getattr(transformers, own)
    try:
        return make(**settings)
    except StrictDataclassError as error:
        raise UnsupportedModelError(f"{header.path!r} describes no {own}: {error}") from error


def _norms(values: GgufValues, architecture: Architecture) -> dict[str, float]:
    key = "attention.layer_norm_rms_epsilon"
    return {} if key in architecture.keys else {"rms_norm_eps": values.factor(key)}


def _heads(
    header: GgufHeader, values: GgufValues, architecture: Architecture, width: int
) -> dict[str, int]:
    if "attention.head_count_kv" in architecture.keys:
        return {}
    heads = values.count("attention.head_count")
    of_kv = values.count("attention.head_count_kv", heads)
    if heads % of_kv:
        values.refuse("attention.head_count_kv", f"only divisors of the head_count, {heads}")
    head_dim = values.count("attention.key_length", width // heads)
    rotated = ["rope.dimension_count"] if architecture.rotates_all else []
    for key in ("attention.value_length", *rotated):
        values.equal(key, head_dim, "the width of keys", default=head_dim)
    queries = header.tensors.get("blk.0.attn_q.weight")
    rows = heads * head_dim * (2 if architecture.has_gates else 1)
    if queries is not None and queries.shape[0] != rows:
        known = f"only heads of {head_dim} that make up {queries.shape[0]} rows of queries"
        values.refuse("attention.head_count", known)
    return {"num_attention_heads": heads, "num_key_value_heads": of_kv, "head_dim": head_dim}


def _experts(header: GgufHeader, values: GgufValues, architecture: Architecture) -> dict[str, Any]:
    count, used = values.count("expert_count"), values.count("expert_used_count")
    if used > count:
        values.refuse("expert_used_count", f"at most the expert_count, {count}")
    for name, tensor in header.tensors.items():
        if architecture.experts_name(name):
            values.equal("expert_count", tensor.shape[0], f"the experts of {name}")
    return architecture.expert_settings(values)


def token_id(header: GgufHeader, name: str) -> int | None:
    """Of a special token; None: there is none. Raises UnsupportedModelError for what is no id."""
    key = f"tokenizer.ggml.{name}_token_id"
    is_sentencepiece = header.metadata.get("tokenizer.ggml.model") == "llama"
    found = header.metadata.get(key, UNSAID_IDS.get(name) if is_sentencepiece else None)
    if found is not None and (type(found) is not int or found < 0):
        raise UnsupportedModelError(f"{header.path!r} has {key} = {found!r}, which is no token")
    return found


def _special_tokens(header: GgufHeader, vocab_size: int) -> dict[str, Any]:
    """All tokens that end an answer are ends of sequence to transformers."""
    ids = {}
    for name in ("bos", "eos", "eot", "eom", "padding"):
        ids[name] = found = token_id(header, name)
        if name == "padding" and found is not None and found >= vocab_size:
            ids[name] = None  # nothing is padded, and some files say so
        elif found is not None and found >= vocab_size:
            raise UnsupportedModelError(
                f"{header.path!r} has tokenizer.ggml.{name}_token_id = {found}, but the embedding "
                f"has {vocab_size} rows"
            )
    known = (ids["eos"], ids["eot"], ids["eom"], *header.end_ids)
    ends = list(dict.fromkeys(i for i in known if i is not None and i not in header.inner_ids))
    return {
        "bos_token_id": ids["bos"],
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": ids["padding"],
    }


def _dtype(header: GgufHeader) -> str:
    """In which to compute: that of the matrices where they are not quantised, else bfloat16."""
    types = {tensor.type for tensor in header.tensors.values() if len(tensor.shape) > 1}
    for kind, dtype in (("BF16", "bfloat16"), ("F16", "float16"), ("F32", "float32")):
        if types <= {kind, "F32"}:
            return dtype
    return "bfloat16"
