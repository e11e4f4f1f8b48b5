"""Work: counted as by going through every token, key and range."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st

from flexinfer.attention.base import AttentionMetadata, AttentionOptions, LayerKV
from flexinfer.attention.segments import Segment, SharedRange
from flexinfer.engine.work import Work, attention_work, linear_work
from flexinfer.layers.quantised import Scheme
from flexinfer.layers.quantised_linear import QuantisedLinear

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 8
LENGTHS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=4)


def metadata_of(lengths: list[tuple[int, int]], shared: list[SharedRange]) -> AttentionMetadata:
    """lengths: of each segment, what has KV already and what is new."""
    segments, row = [], 0
    for slot, (start, num_new) in enumerate(sorted(lengths, key=lambda length: length[1] != 1)):
        segments.append(Segment(slot, row, start, start + num_new))
        row += num_new
    return AttentionMetadata.build(segments, torch.device("cpu"), shared)


@given(LENGTHS, st.none() | st.integers(1, 12), st.sampled_from([torch.float32, torch.bfloat16]))
def test_attention_reads_what_its_tokens_see(
    lengths: list[tuple[int, int]], window: int | None, dtype: torch.dtype
) -> None:
    metadata = metadata_of(lengths, [])
    arena = torch.zeros(4, 32, NUM_KV_HEADS, HEAD_DIM, dtype=dtype)
    num_tokens = sum(segment.num_tokens for segment in metadata.segments)
    query = torch.zeros(NUM_HEADS, num_tokens, HEAD_DIM, dtype=dtype)
    seen = [
        (segment.slot, position, key)
        for segment in metadata.segments
        for position in range(segment.start, segment.end)
        for key in range(position + 1)
        if window is None or position - key < window
    ]
    read = {(slot, key) for slot, _, key in seen}
    options = AttentionOptions(sliding_window=window)
    assert attention_work(LayerKV(arena, arena), query, options, metadata) == Work(
        flops=4 * NUM_HEADS * HEAD_DIM * len(seen),
        num_bytes=2 * NUM_KV_HEADS * HEAD_DIM * dtype.itemsize * len(read),
    )


@given(LENGTHS, st.data())
def test_what_no_wanted_row_sees_is_no_work(lengths: list[tuple[int, int]], data: Any) -> None:
    """Wanted rows are a segment's last ones, as in prefills and in what speculation verifies."""
    metadata = metadata_of(lengths, [])
    arena = torch.zeros(4, 32, NUM_KV_HEADS, HEAD_DIM)
    num_tokens = sum(segment.num_tokens for segment in metadata.segments)
    seen, rows = [], []
    for s in metadata.segments:
        count = data.draw(st.integers(0, s.num_tokens))
        rows += range(s.row + s.num_tokens - count, s.row + s.num_tokens)
        seen += [(s.slot, at, key) for at in range(s.end - count, s.end) for key in range(at + 1)]
    wanting = replace(metadata, wanted_rows=data.draw(st.permutations(rows)))
    query = torch.zeros(NUM_HEADS, num_tokens, HEAD_DIM)
    assert attention_work(LayerKV(arena, arena), query, AttentionOptions(), wanting) == Work(
        flops=4 * NUM_HEADS * HEAD_DIM * len(seen),
        num_bytes=2 * NUM_KV_HEADS * HEAD_DIM * 4 * len({(slot, key) for slot, _, key in seen}),
    )


def test_a_shared_range_is_read_once() -> None:
    arena = torch.zeros(4, 32, NUM_KV_HEADS, HEAD_DIM)
    query = torch.zeros(NUM_HEADS, 3, HEAD_DIM)
    work = [
        attention_work(
            LayerKV(arena, arena), query, AttentionOptions(), metadata_of([(9, 1)] * 3, shared)
        )
        for shared in ([], [SharedRange(0, 0, 8, (0, 1, 2))])
    ]
    token_bytes = 2 * NUM_KV_HEADS * HEAD_DIM * 4
    assert work[0].flops == work[1].flops
    assert work[0].num_bytes - work[1].num_bytes == 2 * 8 * token_bytes


def test_a_product_reads_its_weight_once() -> None:
    linear = torch.nn.Linear(6, 10, dtype=torch.bfloat16)
    x = torch.zeros(1, 7, 6, dtype=torch.bfloat16)
    assert linear_work(linear, x) == Work(flops=2 * 7 * 60, num_bytes=120)
    assert linear_work(torch.nn.Identity(), x) == Work()


def test_a_quantised_weight_is_fewer_bytes() -> None:
    source = Scheme.parse("int4").quantise(torch.randn(64, 96))
    layer = QuantisedLinear(source, None, torch.float32)
    assert linear_work(layer, torch.zeros(1, 96)).num_bytes == 64 * 96 / 2 + 64 * 3 * 2
