"""Decodes that share read shared KV once through flash-attn's functions, and say the same.

References with the real functions' demands stand in their place: see flash_reference.py.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st

from flexinfer.attention.base import AttentionMetadata, AttentionOptions, LayerKV
from flexinfer.attention.flash import FlashAttention
from flexinfer.attention.flash_kernels import Flash2
from flexinfer.attention.sdpa import SdpaAttention
from flexinfer.attention.segments import Segment, SharedRange
from flexinfer.attention.sharing_cost import SharingCost, choose_ranges
from flexinfer.attention.two_phase_flash import FlashPartial, cuda_cost
from helpers.flash_kit import EXACT, HEAD_DIM, MAX_SEQ_LEN, flash2, half_layers
from helpers.flash_reference import FlashAttn2
from helpers.sharing_forests import random_batch

torch.set_num_threads(1)
ALWAYS = SharingCost(1, 1, 0, 0)
SOME = SharingCost(1, 1, 8, 1)


def shared_step(
    segments: list[Segment], ranges: list[SharedRange], num_kv_heads: int, group: int, seed: int
) -> tuple[list[LayerKV], torch.Tensor, torch.Tensor, torch.Tensor]:
    """Arenas that hold equal numbers where a range is shared, and NaN behind what is stored; q, k
    and v of the batch."""
    generator = torch.manual_seed(seed)
    shape = (len(segments), MAX_SEQ_LEN, 2, 2, num_kv_heads, HEAD_DIM)
    arena = torch.randn(shape, generator=generator)
    for shared in ranges:
        slots = [segments[i].slot for i in shared.members]
        tokens = slice(shared.start, shared.end)
        arena[slots, tokens] = arena[shared.slot, tokens].clone()
    for s in segments:
        arena[s.slot, s.start :] = torch.nan
    layers = [LayerKV(arena[:, :, i, 0], arena[:, :, i, 1]) for i in range(2)]
    num_tokens = segments[-1].row + segments[-1].num_tokens
    q = torch.randn(num_kv_heads * group, num_tokens, HEAD_DIM, generator=generator)
    k, v = torch.randn(2, num_kv_heads, num_tokens, HEAD_DIM, generator=generator)
    return layers, q, k, v


def hide_other_copies(
    layer: LayerKV, segments: list[Segment], calls: list[SharedRange], num_decodes: int
) -> None:
    """What decodes must not read in their own slots becomes unreadable."""
    for shared in calls:
        for i in shared.members:
            if i < num_decodes and segments[i].slot != shared.slot:
                for x in (layer.k, layer.v):
                    x[segments[i].slot, shared.start : shared.end] = torch.nan


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(2, 10),
    heads=st.sampled_from([(1, 1), (2, 3), (4, 1)]),
    scaling=st.sampled_from([None, 0.5]),
    cost=st.sampled_from([ALWAYS, SOME]),
)
def test_shared_ranges_are_read_once_and_change_nothing(
    seed: int, size: int, heads: tuple[int, int], scaling: float | None, cost: SharingCost
) -> None:
    """Decodes that share and that do not, in one batch with prefills."""
    segments, ranges = random_batch(Random(seed), size)
    calls = choose_ranges(ranges, segments, cost)
    metadata = AttentionMetadata.build(segments, torch.device("cpu"), calls)
    layers, q, k, v = shared_step(segments, ranges, *heads, seed)
    others = [LayerKV(layer.k.clone(), layer.v.clone()) for layer in layers]
    options = AttentionOptions(scaling=scaling)
    expected = SdpaAttention(others).forward(1, q, k, v, options, metadata)
    hide_other_copies(layers[1], segments, calls, metadata.num_decodes)
    module = FlashAttn2(EXACT)
    kernel = Flash2(module)
    backend = FlashAttention(layers, kernel, kernel, FlashPartial(module.flash_attn_with_kvcache))
    output = backend.forward(1, q, k, v, options, metadata)
    assert output.is_contiguous()
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-4)
    for s in segments:
        for mine, theirs in ((layers[1].k, others[1].k), (layers[1].v, others[1].v)):
            new = slice(s.start, s.end)
            assert torch.equal(mine[s.slot, new], theirs[s.slot, new])
    num_suffixes = len({0, *(shared.end for shared in calls)}) if calls else 1
    assert module.calls.count("with_kvcache") <= len(calls) + num_suffixes


@pytest.mark.parametrize(
    "options", [AttentionOptions(sliding_window=20), AttentionOptions(softcap=2.0)]
)
def test_layers_that_are_not_plain_do_not_share(options: AttentionOptions) -> None:
    segments = [Segment(i, i, start, start + 1) for i, start in enumerate((30, 40, 6))]
    ranges = [SharedRange(0, 0, 25, (0, 1))]
    layers, q, k, v = shared_step(segments, ranges, 2, 2, seed=3)
    metadata = AttentionMetadata.build(segments, torch.device("cpu"), ranges)
    module = FlashAttn2(EXACT)
    kernel = Flash2(module)
    backend = FlashAttention(layers, kernel, kernel, FlashPartial(module.flash_attn_with_kvcache))
    plain = FlashAttention(layers, *flash2())
    expected = plain.forward(0, q, k, v, options, metadata)
    assert backend.graph_sharing_cost == backend.sharing_cost == cuda_cost(layers[0])
    assert torch.equal(backend.forward(0, q, k, v, options, metadata), expected)
    assert module.calls == ["with_kvcache"]
    assert backend.graph_sharing_cost is None


def test_only_a_backend_with_the_calls_for_it_asks_for_shared_ranges() -> None:
    layers, kernels = half_layers(), flash2()
    assert FlashAttention(layers, *kernels).sharing_cost is None
    partial = FlashPartial(FlashAttn2().flash_attn_with_kvcache)
    cost = FlashAttention(layers, *kernels, partial).sharing_cost
    assert cost == cuda_cost(layers[0])
    assert cost is not None
    assert cost.token_bytes == 2 * 2 * HEAD_DIM * 2


def test_sharing_on_a_gpu_waits_for_long_ranges_of_many_requests() -> None:
    cost = SharingCost(4096, 5e6, 250, 0.2)  # Llama 3 8B
    assert cost == replace(cuda_cost(half_layers()[0]), token_bytes=4096)
    assert cost.gain_us(1024, 8, 8) < 0
    assert cost.gain_us(16384, 32, 32) > 0
