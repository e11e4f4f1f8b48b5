"""SDPA over a strided arena equals attention written out on dense tensors, for any mixed batch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st

from flexinfer import attention
from flexinfer.attention.base import AttentionMetadata, AttentionOptions, LayerKV
from flexinfer.attention.segments import Segment

torch.set_num_threads(1)
HEAD_DIM, MAX_SEQ_LEN, NUM_SLOTS = 8, 700, 6


def make_layers(num_kv_heads: int, num_layers: int = 2) -> list[LayerKV]:
    """Interleaved arenas: token stride spans all layers; unwritten rows are NaN."""
    shape = (NUM_SLOTS, MAX_SEQ_LEN, num_layers, 2, num_kv_heads, HEAD_DIM)
    arena = torch.full(shape, torch.nan)
    return [LayerKV(arena[:, :, i, 0], arena[:, :, i, 1]) for i in range(num_layers)]


def slow_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, options: AttentionOptions
) -> torch.Tensor:
    """One request. q: [heads, rows, dim] at positions start...; k, v: [tokens, kv_heads, dim]."""
    num_heads, num_rows, _ = q.shape
    group = num_heads // k.shape[1]
    out = torch.empty(num_rows, num_heads, HEAD_DIM)
    scaling = options.scaling if options.scaling is not None else HEAD_DIM**-0.5
    for row in range(num_rows):
        position = start + row
        first = 0
        if options.sliding_window is not None:
            first = max(0, position - options.sliding_window + 1)
        for head in range(num_heads):
            scores = k[first : position + 1, head // group] @ q[head, row] * scaling
            if options.softcap is not None:
                scores = options.softcap * torch.tanh(scores / options.softcap)
            if options.sinks is not None:
                scores = torch.cat([scores, options.sinks[head].view(1)])
            weights = torch.softmax(scores, 0)[: position + 1 - first]
            out[row, head] = weights @ v[first : position + 1, head // group]
    return out


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[int, int]]:
    """(tokens with KV, new tokens) of each request, one-token ones first."""
    some = st.tuples(st.integers(0, 40), st.integers(1, 30))
    lengths = draw(st.lists(some, min_size=1, max_size=NUM_SLOTS))
    return sorted(lengths, key=lambda pair: pair[1] > 1)


def check_step(
    lengths: list[tuple[int, int]], num_kv_heads: int, group: int, options: AttentionOptions
) -> None:
    generator = torch.manual_seed(len(lengths))
    layers = make_layers(num_kv_heads)
    backend = attention.create("sdpa", layers)
    slots = torch.randperm(NUM_SLOTS, generator=generator).tolist()
    segments, row = [], 0
    for slot, (start, num_new) in zip(slots, lengths, strict=False):
        layers[1].k[slot, :start] = torch.randn(start, num_kv_heads, HEAD_DIM, generator=generator)
        layers[1].v[slot, :start] = torch.randn(start, num_kv_heads, HEAD_DIM, generator=generator)
        segments.append(Segment(slot, row, start, start + num_new))
        row += num_new
    q = torch.randn(num_kv_heads * group, row, HEAD_DIM, generator=generator)
    k, v = torch.randn(2, num_kv_heads, row, HEAD_DIM, generator=generator)
    metadata = AttentionMetadata.build(segments, torch.device("cpu"))
    output = backend.forward(1, q, k, v, options, metadata)
    for s in segments:
        rows = slice(s.row, s.row + s.num_tokens)
        stored = layers[1].k[s.slot, : s.end], layers[1].v[s.slot, : s.end]
        assert torch.equal(stored[0][s.start :], k[:, rows].transpose(0, 1))
        expected = slow_attention(q[:, rows], *stored, s.start, options)
        torch.testing.assert_close(output[rows], expected, atol=1e-5, rtol=1e-4)
        assert layers[1].k[s.slot, s.end :].isnan().all()
    assert layers[0].k.isnan().all()


@settings(max_examples=60, deadline=None)
@given(
    lengths=steps(),
    heads=st.sampled_from([(1, 1), (2, 3), (4, 1)]),
    scaling=st.sampled_from([None, 0.5]),
    sliding_window=st.sampled_from([None, 1, 7, 33]),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
)
def test_mixed_batch_equals_slow_attention(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    sinks: bool,
) -> None:
    num_heads = heads[0] * heads[1]
    options = AttentionOptions(
        scaling, sliding_window, softcap, torch.linspace(-1, 2, num_heads) if sinks else None
    )
    check_step(lengths, heads[0], heads[1], options)


@pytest.mark.parametrize("sliding_window", [None, 300])
def test_long_chunk_in_several_blocks_equals_slow_attention(sliding_window: int | None) -> None:
    check_step([(150, 530)], 1, 2, AttentionOptions(sliding_window=sliding_window))


def test_decodes_are_the_leading_one_token_segments() -> None:
    segments = [Segment(3, 0, 9, 10), Segment(1, 1, 0, 1), Segment(0, 2, 4, 8)]
    metadata = AttentionMetadata.build(segments, torch.device("cpu"))
    assert metadata.num_decodes == 2
    assert metadata.decode_slots.tolist() == [3, 1]
    assert metadata.decode_positions.tolist() == [9, 0]


def test_attention_copies_neither_k_nor_v() -> None:
    layers = make_layers(2)
    backend = attention.create("sdpa", layers)
    layers[0].k[0, :600] = 1.0
    layers[0].v[0, :600] = 1.0
    q, kv = torch.randn(4, 1, HEAD_DIM), torch.randn(2, 1, HEAD_DIM)
    metadata = AttentionMetadata.build([Segment(0, 0, 600, 601)], torch.device("cpu"))
    with torch.profiler.profile(profile_memory=True) as profile:
        backend.forward(0, q, kv, kv, AttentionOptions(), metadata)
    names = {event.key for event in profile.key_averages()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names
    kv_bytes = 600 * 2 * HEAD_DIM * 4
    assert max(event.cpu_memory_usage for event in profile.events()) < kv_bytes


def test_unknown_backend_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"must be one of auto, .* got 'magic'"):
        attention.create("magic", [])
