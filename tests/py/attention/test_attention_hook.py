"""The operator flexinfer::attention is what torch.compile takes it for, and calls the backend."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer import attention
from flexinfer.attention.base import AttentionMetadata, AttentionOptions, LayerKV
from flexinfer.attention.hook import register, use_attention
from flexinfer.attention.segments import Segment
from helpers.tiny_models import make_model

HEAD_DIM, NUM_HEADS, NUM_KV_HEADS = 8, 4, 2


def make_step(num_tokens: int) -> tuple[Any, AttentionMetadata]:
    arena = torch.zeros(2, 2, 64, NUM_KV_HEADS, HEAD_DIM)
    backend = attention.create("sdpa", [LayerKV(arena[0], arena[1])])
    segment = Segment(slot=1, row=0, start=0, end=num_tokens)
    return backend, AttentionMetadata.build([segment], torch.device("cpu"))


def make_arguments(num_tokens: int, sinks: bool) -> tuple[Any, ...]:
    q = torch.randn(NUM_HEADS, num_tokens, HEAD_DIM)
    k, v = torch.randn(2, NUM_KV_HEADS, num_tokens, HEAD_DIM)
    return q, k, v, 0, 0.5, 3, 2.0, torch.ones(NUM_HEADS) if sinks else None


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("sinks", [True, False])
def test_operator_equals_the_backend(num_tokens: int, sinks: bool) -> None:
    register()
    backend, metadata = make_step(num_tokens)
    q, k, v, layer_idx, scaling, window, softcap, sink = make_arguments(num_tokens, sinks)
    options = AttentionOptions(scaling, window, softcap, sink)
    expected = backend.forward(layer_idx, q, k, v, options, metadata)
    with use_attention(make_model("llama"), backend, metadata):
        output = torch.ops.flexinfer.attention(q, k, v, layer_idx, scaling, window, softcap, sink)
    assert torch.equal(output, expected)


def test_operator_keeps_the_rules_of_torch_library() -> None:
    register()
    backend, metadata = make_step(5)
    with use_attention(make_model("llama"), backend, metadata):
        torch.library.opcheck(
            torch.ops.flexinfer.attention.default,
            make_arguments(5, sinks=True),
            test_utils=("test_schema", "test_faketensor"),
        )


def test_the_model_attends_as_before_after_a_step() -> None:
    model = make_model("llama")
    before = model.config._attn_implementation
    with use_attention(model, *make_step(1)):
        assert model.config._attn_implementation == "flexinfer"
    assert model.config._attn_implementation == before
