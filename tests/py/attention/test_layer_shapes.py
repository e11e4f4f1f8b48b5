"""Layers of unlike shapes, layers that share KV, and values that are a part of the keys."""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")

from flexinfer.attention.base import AttentionMetadata, AttentionOptions, LayerKV
from flexinfer.attention.host import HostAttention
from flexinfer.attention.sdpa import SdpaAttention
from flexinfer.attention.segments import Segment

NUM_SLOTS = 8
CPU = torch.device("cpu")


def test_layers_of_several_shapes_each_with_its_own() -> None:
    """As Gemma 4 has them: few wide heads that see all, many narrow ones with a window."""
    generator = torch.Generator().manual_seed(3)
    layers, wide = [], []
    for num_kv_heads, key_dim, value_dim in ((1, 512, 512), (4, 64, 64), (2, 192, 128)):
        shape = (NUM_SLOTS, 40, num_kv_heads, key_dim + value_dim)
        arena = torch.randn(shape, generator=generator)
        layers.append(LayerKV(*arena.split([key_dim, value_dim], -1)))
        wide.append(LayerKV(*arena.clone().split([key_dim, value_dim], -1)))
    backend, reference = HostAttention(layers), SdpaAttention(wide)
    metadata = AttentionMetadata.build([Segment(1, 0, 30, 31), Segment(4, 1, 0, 20)], CPU)
    for i, layer in enumerate(layers):
        num_kv_heads, key_dim = layer.k.shape[2:]
        widths = ((4 * num_kv_heads, key_dim), (num_kv_heads, key_dim))
        rows = [torch.randn(n, 21, w, generator=generator) for n, w in widths]
        rows.append(torch.randn(num_kv_heads, 21, layer.v.shape[3], generator=generator))
        options = AttentionOptions(sliding_window=8 if i == 1 else None)
        output = backend.forward(i, *rows, options, metadata)
        expected = reference.forward(i, *rows, options, metadata)
        torch.testing.assert_close(output, expected, atol=2e-5, rtol=2e-5)
        assert torch.equal(layer.k, wide[i].k)
        assert torch.equal(layer.v, wide[i].v)


@pytest.mark.parametrize("backend", [HostAttention, SdpaAttention])
def test_a_layer_that_shares_kv_reads_what_another_stored(
    backend: type[HostAttention | SdpaAttention],
) -> None:
    """And values that are a part of the keys are stored with them."""
    arena = torch.full((NUM_SLOTS, 10, 1, 48), torch.nan)
    latent = LayerKV(arena, arena[..., :32])
    reader = dataclasses.replace(latent, stores=False)
    assert latent.stores_values is False
    metadata = AttentionMetadata.build([Segment(2, 0, 0, 1), Segment(3, 1, 0, 4)], CPU)
    query, key = torch.randn(2, 5, 48), torch.randn(1, 5, 48)
    wrong = torch.full((1, 5, 32), 7.0)
    attention = backend([latent, reader])
    first = attention.forward(0, query, key, wrong, AttentionOptions(), metadata)
    assert torch.equal(arena[3, :4, 0], key[0, 1:])
    second = attention.forward(1, query, key + 1, wrong, AttentionOptions(), metadata)
    assert torch.equal(first, second)
    torch.testing.assert_close(first[0, 0], key[0, 0, :32])
