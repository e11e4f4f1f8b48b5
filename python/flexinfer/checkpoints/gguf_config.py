"""The config that a GGUF file describes, for the architectures whose weights are known here.

A key that is not known is refused by name: most change what the model computes. Source:
docs/gguf.md and gguf/constants.py of llama.cpp; names of weights as in gguf/tensor_mapping.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, NoReturn

from flexinfer.checkpoints.gguf_header import GgufHeader
from flexinfer.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class Architecture:
    """How llama.cpp writes the models of one transformers class."""

    config: str | None
    """Name of the config's class; None: there is none without experts."""
    rotates_pairs: bool = False
    """Rows of queries and keys lie in the order in which neighbours are rotated together."""
    experts_config: str | None = None
    """Name of the config's class of models with experts."""


ARCHITECTURES = {
    "llama": Architecture("LlamaConfig", rotates_pairs=True, experts_config="MixtralConfig"),
    "qwen2": Architecture("Qwen2Config"),
    "qwen3": Architecture("Qwen3Config"),
    "qwen3moe": Architecture(None, experts_config="Qwen3MoeConfig"),
}
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""llama.cpp's name of a part -> transformers'."""
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
"""llama.cpp's name of the weights of all experts of a layer -> which part of theirs they are."""
BLOCK = re.compile(r"blk\.([0-9]+)\.(\w+)\.(\w+)")
"""llama.cpp's name of a tensor of one layer: its number, the part, weight or bias."""
ROPE_FACTORS = "rope_freqs.weight"
"""By what the frequencies of the rotary embedding are divided (Llama 3)."""
SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
}
"""Keys that must be there -> names of the config."""
OTHER_KEYS = {
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
    "vocab_size",
}


UNSAID_IDS = {"bos": 1, "eos": 2, "unknown": 0}
"""Special tokens of SentencePiece where the file does not name them, as llama.cpp takes them."""


def architecture_of(header: GgufHeader) -> Architecture:
    """Raises UnsupportedModelError for one that is not known."""
    found = ARCHITECTURES.get(header.architecture)
    if found is None:
        raise UnsupportedModelError(
            f"{header.path!r} is a GGUF file of the architecture {header.architecture!r}; known "
            f"are {', '.join(ARCHITECTURES)}"
        )
    return found


def config_of(header: GgufHeader) -> Any:
    """The transformers config. Raises UnsupportedModelError for what a file says and it cannot."""
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    architecture = architecture_of(header)
    values = _Values(header)
    values.refuse_unknown()
    settings: dict[str, Any] = {name: values.count(key) for key, name in SIZES.items()}
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
    if own == "LlamaConfig":
        settings["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    if num_experts:
        settings |= _experts(header, values, own)
    blocks = {block[1] for name in header.tensors if (block := BLOCK.fullmatch(name))}
    values.equal("block_count", len(blocks), "the number of blocks that have tensors")
    make: Callable[..., Any] = getattr(transformers, own)
    try:
        return make(
            **settings,
            **_heads(header, values, width),
            rms_norm_eps=values.factor("attention.layer_norm_rms_epsilon"),
            vocab_size=vocab_size,
            rope_parameters=_rope(values),
            tie_word_embeddings="output.weight" not in header.tensors,
            dtype=_dtype(header),
            **_special_tokens(header, vocab_size),
        )
    except StrictDataclassError as error:
        raise UnsupportedModelError(f"{header.path!r} describes no {own}: {error}") from error


def _heads(header: GgufHeader, values: _Values, width: int) -> dict[str, int]:
    heads = values.count("attention.head_count")
    of_kv = values.count("attention.head_count_kv", heads)
    if heads % of_kv:
        values.refuse("attention.head_count_kv", f"only divisors of the head_count, {heads}")
    head_dim = values.count("attention.key_length", width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        values.equal(key, head_dim, "the width of keys", default=head_dim)
    queries = header.tensors.get("blk.0.attn_q.weight")
    if queries is not None and queries.shape[0] != heads * head_dim:
        known = f"only heads of {head_dim} that make up {queries.shape[0]} rows of queries"
        values.refuse("attention.head_count", known)
    return {"num_attention_heads": heads, "num_key_value_heads": of_kv, "head_dim": head_dim}


def _experts(header: GgufHeader, values: _Values, config: str) -> dict[str, Any]:
    """Weights of a token's experts add up to 1 in both architectures."""
    count, used = values.count("expert_count"), values.count("expert_used_count")
    if used > count:
        values.refuse("expert_used_count", f"at most the expert_count, {count}")
    for name, tensor in header.tensors.items():
        if experts_name(name):
            values.equal("expert_count", tensor.shape[0], f"the experts of {name}")
    key = "expert_feed_forward_length"
    if config == "Qwen3MoeConfig":
        return {
            "num_experts": count,
            "num_experts_per_tok": used,
            "moe_intermediate_size": values.count(key),
            "norm_topk_prob": True,
        }
    width = values.count("feed_forward_length")
    values.equal(key, width, "the feed_forward_length", default=width)
    return {"num_local_experts": count, "num_experts_per_tok": used, "sliding_window": None}


def experts_name(name: str) -> tuple[str, str] | None:
    """The module of the experts that the file calls `name`, and the part; None: it is no such."""
    block = BLOCK.fullmatch(name)
    if block is None or block[2] not in EXPERTS or block[3] != "weight":
        return None
    return f"model.layers.{block[1]}.mlp.experts", EXPERTS[block[2]]


def model_name(name: str) -> str | None:
    """What transformers calls the weight that the file calls `name`; None: there is none."""
    if block := BLOCK.fullmatch(name):
        layer, part, ending = f"model.layers.{block[1]}.", block[2], block[3]
    else:
        layer, (part, _, ending) = "", name.rpartition(".")
    return f"{layer}{NAMES[part]}.{ending}" if part in NAMES else None


class _Values:
    """The values of a file's architecture."""

    def __init__(self, header: GgufHeader) -> None:
        self._header, self._prefix = header, header.architecture + "."

    def get(self, key: str, default: Any = None) -> Any:
        """Raises UnsupportedModelError for a value for each layer."""
        value = self._header.metadata.get(self._prefix + key, default)
        if isinstance(value, list):
            raise UnsupportedModelError(
                f"{self._header.path!r} has one for each layer of {self._prefix}{key}"
            )
        return value

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise UnsupportedModelError(f"{self._header.path!r} has no {self._prefix}{key}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """default: None where there has to be one. Raises UnsupportedModelError for what counts
        nothing."""
        value = self.need(key) if default is None else self.get(key, default)
        if type(value) is not int or value < 1:
            self.refuse(key, "whole numbers from 1 on")
        return value

    def factor(self, key: str, default: float | None = None) -> float:
        """As `count`, of numbers that something is multiplied with or divided by."""
        value = self.need(key) if default is None else self.get(key, default)
        if type(value) not in (int, float) or not 0 < value < inf:
            self.refuse(key, "numbers above 0")
        return float(value)

    def equal(self, key: str, wanted: int, of: str, default: int | None = None) -> None:
        """Raises UnsupportedModelError where it is not what `of` are."""
        if self.count(key, default) != wanted:
            self.refuse(key, f"only {of}, {wanted}")

    def refuse(self, key: str, known: str) -> NoReturn:
        raise UnsupportedModelError(
            f"{self._header.path!r} has {self._prefix}{key} = {self.get(key)!r}; known: {known}"
        )

    def refuse_unknown(self) -> None:
        keys = [k for k in self._header.metadata if k.startswith(self._prefix)]
        known = {self._prefix + key for key in (*SIZES, *OTHER_KEYS)}
        unknown = sorted(set(keys) - known)
        if unknown:
            raise UnsupportedModelError(
                f"{self._header.path!r} has {', '.join(unknown)}, which may change what the model "
                "computes and is not known here"
            )


def _rope(values: _Values) -> dict[str, Any]:
    parameters = {"rope_type": "default", "rope_theta": values.factor("rope.freq_base", 1e4)}
    # A factor alone is of linear scaling, as llama.cpp reads it.
    unsaid = "none" if values.get("rope.scaling.factor") is None else "linear"
    kind = values.get("rope.scaling.type", unsaid)
    if kind == "linear":
        parameters |= {"rope_type": "linear", "factor": values.factor("rope.scaling.factor")}
    elif kind != "none":
        values.refuse("rope.scaling.type", "none and linear")
    return parameters


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
        if found is not None and found >= vocab_size:
            raise UnsupportedModelError(
                f"{header.path!r} has tokenizer.ggml.{name}_token_id = {found}, but the embedding "
                f"has {vocab_size} rows"
            )
    known = (ids["eos"], ids["eot"], ids["eom"], *header.end_ids)
    ends = list(dict.fromkeys(i for i in known if i is not None))
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
