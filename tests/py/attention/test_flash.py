"""Attention through flash-attn's functions equals SDPA, for any mixed batch.

There is no GPU here: references with the real functions' demands stand in their place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st

from flexinfer.attention.base import AttentionMetadata, AttentionOptions, LayerKV
from flexinfer.attention.flash import FlashAttention
from flexinfer.attention.flash_kernels import Flash2
from flexinfer.attention.sdpa import SdpaAttention, folded_sdpa, make_band
from flexinfer.attention.segments import Segment
from flexinfer.attention.torch_flash import count_rows_per_slot, flat_rows
from helpers.flash_kit import (
    EXACT,
    HEAD_DIM,
    KINDS,
    MAX_SEQ_LEN,
    NUM_SLOTS,
    Kernels,
    flash2,
    make_layers,
    torch_flash,
)
from helpers.flash_reference import FlashAttn2

torch.set_num_threads(1)


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[int, int]]:
    """(tokens with KV, new tokens) of each request, one-token ones first."""
    some = st.tuples(st.one_of(st.just(0), st.integers(0, 40)), st.integers(1, 30))
    lengths = draw(st.lists(some, min_size=1, max_size=NUM_SLOTS))
    return sorted(lengths, key=lambda pair: pair[1] > 1)


def check_step(
    make: Callable[[], Kernels],
    lengths: list[tuple[int, int]],
    num_kv_heads: int,
    group: int,
    options: AttentionOptions,
) -> None:
    generator = torch.manual_seed(len(lengths))
    layers = make_layers(num_kv_heads)
    slots = torch.randperm(NUM_SLOTS, generator=generator).tolist()
    segments, row = [], 0
    for slot, (start, num_new) in zip(slots, lengths, strict=False):
        for x in (layers[1].k, layers[1].v):
            x[slot, :start] = torch.randn(start, num_kv_heads, HEAD_DIM, generator=generator)
        segments.append(Segment(slot, row, start, start + num_new))
        row += num_new
    q = torch.randn(num_kv_heads * group, row, HEAD_DIM, generator=generator)
    k, v = torch.randn(2, num_kv_heads, row, HEAD_DIM, generator=generator)
    metadata = AttentionMetadata.build(segments, torch.device("cpu"))
    others = [LayerKV(layer.k.clone(), layer.v.clone()) for layer in layers]
    expected = SdpaAttention(others).forward(1, q, k, v, options, metadata)
    output = FlashAttention(layers, *make()).forward(1, q, k, v, options, metadata)
    assert output.is_contiguous()
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-4)
    for mine, theirs in ((layers[1].k, others[1].k), (layers[1].v, others[1].v)):
        assert torch.equal(torch.nan_to_num(mine), torch.nan_to_num(theirs))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(
    lengths=steps(),
    num_kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3]),
    window=st.sampled_from([None, 1, 5, 64]),
    softcap=st.sampled_from([None, 2.0]),
    scaling=st.sampled_from([None, 0.3]),
)
def test_any_step_equals_sdpa(
    kind: str,
    lengths: list[tuple[int, int]],
    num_kv_heads: int,
    group: int,
    window: int | None,
    softcap: float | None,
    scaling: float | None,
) -> None:
    options = AttentionOptions(scaling=scaling, sliding_window=window, softcap=softcap)
    check_step(KINDS[kind], lengths, num_kv_heads, group, options)


def test_a_step_of_decodes_is_one_call_for_all_requests() -> None:
    module = FlashAttn2(EXACT)
    check_step(
        lambda: (Flash2(module), Flash2(module)), [(3, 1), (9, 1), (4, 1)], 2, 2, AttentionOptions()
    )
    assert module.calls == ["with_kvcache"]


def test_prompts_without_a_prefix_are_one_packed_call() -> None:
    module = FlashAttn2(EXACT)
    lengths = [(3, 1), (0, 5), (0, 7), (8, 6)]
    check_step(lambda: (Flash2(module), Flash2(module)), lengths, 1, 2, AttentionOptions())
    assert module.calls == ["with_kvcache", "varlen", "func"]


def test_a_short_batch_does_not_look_as_long_as_the_arena() -> None:
    shown = []

    class Watch(FlashAttn2):
        @wraps(FlashAttn2.flash_attn_with_kvcache)
        def flash_attn_with_kvcache(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            shown.append(kwargs["k_cache"].shape[1])
            return FlashAttn2.flash_attn_with_kvcache(self, *args, **kwargs)

    kernel = Flash2(Watch(EXACT))
    check_step(lambda: (kernel, kernel), [(3, 1)], 1, 1, AttentionOptions())
    check_step(lambda: (kernel, kernel), [(270, 1)], 1, 1, AttentionOptions())
    assert shown == [256, MAX_SEQ_LEN]


@pytest.mark.parametrize(
    ("make", "options", "what"),
    [
        (flash2, AttentionOptions(sinks=torch.zeros(2)), "attention sinks"),
        (torch_flash, AttentionOptions(softcap=3.0), "soft-capped scores"),
    ],
)
def test_what_the_kernels_do_not_know_goes_to_sdpa_and_is_told_once(
    make: Callable[[], Kernels],
    options: AttentionOptions,
    what: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    layers = make_layers(1)
    backend = FlashAttention(layers, *make())
    assert backend.supports_graphs
    metadata = AttentionMetadata.build([Segment(0, 0, 0, 3)], torch.device("cpu"))
    q, k, v = torch.randn(2, 3, HEAD_DIM), torch.randn(1, 3, HEAD_DIM), torch.randn(1, 3, HEAD_DIM)
    with caplog.at_level(logging.WARNING):
        outputs = [backend.forward(i, q, k, v, options, metadata) for i in range(2)]
    expected = SdpaAttention(make_layers(1)).forward(0, q, k, v, options, metadata)
    assert all(torch.equal(output, expected) for output in outputs)
    assert [what in record.message for record in caplog.records] == [True]
    assert not backend.supports_graphs


def test_flat_rows_are_the_arena_itself() -> None:
    arena = make_layers(2)[1].v
    rows = flat_rows(arena)
    per_slot = count_rows_per_slot(arena)
    rows[3 * per_slot + 17] = 5.0
    assert (arena[3, 17] == 5.0).all()
    assert per_slot == MAX_SEQ_LEN
    assert rows[5 * per_slot + MAX_SEQ_LEN - 1].data_ptr() == arena[5, -1].data_ptr()


def test_slots_that_are_no_whole_number_of_rows_have_no_flat_form() -> None:
    memory = torch.zeros(1000)
    arena = memory.as_strided((3, 4, 1, 8), (100, 24, 8, 1))
    assert count_rows_per_slot(arena) == 0
    huge = torch.empty(1, dtype=torch.bfloat16).as_strided((1, 1, 1, 1), (1, 1, 1, 1))
    assert count_rows_per_slot(huge.expand(2**31, 1, 1, 1)) == 0


def test_folding_kv_heads_into_the_batch_changes_nothing() -> None:
    generator = torch.manual_seed(1)
    q = torch.randn(1, 6, 5, 16, generator=generator)
    k, v = torch.randn(2, 1, 2, 9, 16, generator=generator)
    mask = make_band(300, 4, torch.float32, torch.device("cpu"))[:5, 300 - 256 - 4 : 300 - 256 + 5]
    for arguments in ({"mask": mask}, {"is_causal": True}):
        attn_mask = arguments.get("mask")
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask, is_causal="is_causal" in arguments, enable_gqa=True
        )
        output = folded_sdpa(q, k, v, AttentionOptions(), **arguments)  # type: ignore[arg-type]
        torch.testing.assert_close(output, expected)
