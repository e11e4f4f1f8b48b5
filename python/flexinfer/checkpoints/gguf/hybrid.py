"""What a GGUF file says of models in which some layers have a state in place of keys and values."""

from __future__ import annotations

from typing import Any

from flexinfer.checkpoints.gguf.values import GgufValues

HEADS, KV_HEADS = "attention.head_count", "attention.head_count_kv"
HEAD_DIM = "attention.key_length"


def attending(values: GgufValues) -> list[bool]:
    """Of each layer whether it has heads of keys, which those with a state have not."""
    return [count > 0 for count in _kv_heads(values)]


def heads_of(values: GgufValues, rotates: bool = True) -> dict[str, Any]:
    """Those of the config, of layers that attend. rotates: whether these do, all numbers of a
    head."""
    counts = {count for count in _kv_heads(values) if count}
    if len(counts) != 1:
        values.refuse(KV_HEADS, "one number for all layers that attend, and at least one of them")
    (of_kv,) = counts
    heads = values.count(HEADS)
    if heads % of_kv:
        values.refuse(KV_HEADS, f"only divisors of the head_count, {heads}")
    head_dim = values.count(HEAD_DIM, values.count("embedding_length") // heads)
    for key in ("attention.value_length", *(["rope.dimension_count"] if rotates else [])):
        values.equal(key, head_dim, "the width of keys", default=head_dim)
    queries = values.shape(f"blk.{attending(values).index(True)}.attn_q.weight")
    if queries is not None and queries[0] != heads * head_dim:
        known = f"only heads of {head_dim} that make up {queries[0]} rows of queries"
        values.refuse(HEADS, known)
    return {"num_attention_heads": heads, "num_key_value_heads": of_kv, "head_dim": head_dim}


def _kv_heads(values: GgufValues) -> list[int]:
    """Of each layer."""
    num_layers = values.count("block_count")
    counts = values.of_layers(KV_HEADS)
    if counts is None:
        return [values.count(KV_HEADS, values.count(HEADS))] * num_layers
    if len(counts) != num_layers or not all(type(c) is int and c >= 0 for c in counts):
        values.refuse(KV_HEADS, f"a number, or one for each of {num_layers} layers")
    return counts
