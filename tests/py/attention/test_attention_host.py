"""The host kernel equals the SDPA reference on random batches, with every instruction set."""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")

from hypothesis import example, given, settings
from hypothesis import strategies as st

transformers = pytest.importorskip("transformers")

from flexinfer.attention.base import AttentionMetadata, AttentionOptions, LayerKV
from flexinfer.attention.host import HostAttention
from flexinfer.attention.kv_format import KVFormat
from flexinfer.attention.sdpa import SdpaAttention
from flexinfer.attention.segments import Segment, SharedRange
from flexinfer.runtime.kernels import SCALE_BYTES, available_isas
from flexinfer.runtime.openmp import start_threads_address

torch.set_num_threads(1)
NUM_SLOTS, NUM_LAYERS = 8, 2
ISAS = available_isas()
# Of outputs that are averages of normal numbers; the reference computes in float32.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2.5e-2, torch.float16: 4e-3}
CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Case:
    """One step: segments, the ranges that some of them share, and the model's shape."""

    segments: list[Segment]
    shared: list[SharedRange]
    num_kv_heads: int
    group: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    dense: bool
    options: AttentionOptions
    kv_format: str | None = None

    @property
    def num_tokens(self) -> int:
        return self.segments[-1].row + self.segments[-1].num_tokens

    @property
    def max_seq_len(self) -> int:
        return max(segment.end for segment in self.segments) + 2


@st.composite
def cases(draw: st.DrawFn) -> Case:
    past = st.one_of(st.just(0), st.integers(0, 40), st.integers(100, 420))
    new = st.one_of(st.just(1), st.integers(1, 30), st.integers(80, 140))
    lengths = draw(st.lists(st.tuples(past, new), min_size=1, max_size=NUM_SLOTS))
    lengths.sort(key=lambda pair: pair[1] > 1)
    slots = draw(st.permutations(range(NUM_SLOTS)))
    segments, row = [], 0
    for slot, (start, num_new) in zip(slots, lengths, strict=False):
        segments.append(Segment(slot, row, start, start + num_new))
        row += num_new
    num_kv_heads, group = draw(st.sampled_from([(1, 1), (2, 2), (4, 1), (1, 7), (2, 8), (1, 100)]))
    num_heads = num_kv_heads * group
    sinks = torch.linspace(-1, 2, num_heads) if draw(st.booleans()) else None
    options = AttentionOptions(
        draw(st.sampled_from([None, 0.3])),
        draw(st.sampled_from([None, None, 1, 33, 200])),
        draw(st.sampled_from([None, None, 5.0])),
        sinks,
        draw(st.sampled_from([None, None, 50, 128])),
    )
    return Case(
        segments,
        draw(forests(segments)),
        num_kv_heads,
        group,
        draw(st.sampled_from([16, 64, 80, 192])),
        draw(st.sampled_from([16, 64, 128])),
        draw(st.sampled_from(list(TOLERANCE))),
        draw(st.booleans()),
        options,
        draw(st.sampled_from([None, None, "int8", "fp8_e4m3"])),
    )


WIDE_SCORES = Case(
    [Segment(0, 0, 100, 101), Segment(1, 1, 31, 111)],
    [],
    num_kv_heads=1,
    group=1,
    key_dim=192,
    value_dim=64,
    dtype=torch.bfloat16,
    dense=False,
    options=AttentionOptions(scaling=0.3),
    kv_format="int8",
)
"""Rotated queries that were rounded to bfloat16 were beyond the bound here."""
MANY_WIDE_SCORES = dataclasses.replace(
    WIDE_SCORES, segments=[Segment(0, 0, 28, 29), Segment(1, 1, 28, 108)], group=100
)
"""And here keys that were rotated back, and rounded to bfloat16 as they were packed."""


@st.composite
def forests(draw: st.DrawFn, segments: list[Segment]) -> list[SharedRange]:
    """Nested ranges: those who share the first range may split up for the next one."""
    ranges: list[SharedRange] = []

    def grow(members: list[int], start: int) -> None:
        end = start + draw(st.sampled_from([16, 100, 150]))
        staying = [i for i in members if segments[i].start >= end]
        if len(staying) < 2 or not draw(st.booleans()):
            return
        ranges.append(SharedRange(segments[staying[0]].slot, start, end, tuple(staying)))
        cut = draw(st.integers(0, len(staying)))
        grow(staying[:cut], end)
        grow(staying[cut:], end)

    grow(list(range(len(segments))), 0)
    return ranges


def make_arena(case: Case, generator: torch.Generator) -> torch.Tensor:
    """[layers, slots, tokens, kv heads, key_dim + value_dim] view; cached tokens random, shared
    ones equal, NaN elsewhere."""
    shape = (NUM_SLOTS, case.max_seq_len, case.num_kv_heads, case.key_dim + case.value_dim)
    if case.dense:
        arena = torch.full((NUM_LAYERS, *shape), torch.nan)
    else:
        arena = torch.full((shape[0], shape[1], NUM_LAYERS, *shape[2:]), torch.nan)
        arena = arena.permute(2, 0, 1, 3, 4)
    for s in case.segments:
        size = (NUM_LAYERS, s.start, *shape[2:])
        arena[:, s.slot, : s.start] = torch.randn(size, generator=generator)
    for shared in case.shared:
        for member in shared.members:
            slot = case.segments[member].slot
            part = arena[:, :, shared.start : shared.end]
            part[:, slot] = part[:, shared.slot].clone()
    if case.kv_format is None:
        return arena.to(case.dtype)
    stored = KVFormat(case.kv_format, case.dtype)
    order, back = ((0, 1, 2, 3, 4),) * 2 if case.dense else ((1, 2, 0, 3, 4), (2, 0, 1, 3, 4))
    parts = arena.permute(order).split([case.key_dim, case.value_dim], -1)
    rows = stored.quantise_keys(parts[0]), stored.quantise(parts[1])
    return torch.cat(rows, -1).permute(back)


def layers_of(case: Case, arena: torch.Tensor, dtype: torch.dtype | None = None) -> list[LayerKV]:
    stored = case.kv_format and KVFormat(case.kv_format, dtype or case.dtype)
    key_bytes = case.key_dim + (SCALE_BYTES if stored else 0)
    parts = [arena[i].tensor_split([key_bytes], -1) for i in range(NUM_LAYERS)]
    return [LayerKV(k, v, format=stored or None) for k, v in parts]


def copy_of(arena: torch.Tensor) -> torch.Tensor:
    """With the same strides."""
    return arena.clone(memory_format=torch.preserve_format)


def random_rows(case: Case, generator: torch.Generator) -> list[torch.Tensor]:
    """q, k, v as the models make them: [heads, tokens, dim], transposed."""
    heads = (case.num_kv_heads * case.group, case.num_kv_heads, case.num_kv_heads)
    widths = (case.key_dim, case.key_dim, case.value_dim)
    shapes = [(case.num_tokens, *of) for of in zip(heads, widths, strict=True)]
    return [torch.randn(s, generator=generator).to(case.dtype).transpose(0, 1) for s in shapes]


def expected_of(
    case: Case, arena: torch.Tensor, rows: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and arena by SDPA in float32."""
    wide = copy_of(arena) if case.kv_format else copy_of(arena).float()
    metadata = AttentionMetadata.build(case.segments, CPU)
    q, k, v = (part.float() for part in rows)
    output = SdpaAttention(layers_of(case, wide, torch.float32)).forward(
        1, q, k, v, case.options, metadata
    )
    return output, wide


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=40, deadline=None)
@given(case=cases(), seed=st.integers(0, 1000))
@example(case=WIDE_SCORES, seed=0)
@example(case=MANY_WIDE_SCORES, seed=0)
def test_host_kernel_equals_sdpa(isa: str, case: Case, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    arena = make_arena(case, generator)
    rows = random_rows(case, generator)
    expected, expected_arena = expected_of(case, arena, rows)
    metadata = dataclasses.replace(
        AttentionMetadata.build(case.segments, CPU), shared=tuple(case.shared)
    )
    backend = HostAttention(layers_of(case, arena), isa)
    output = backend.forward(1, *rows, case.options, metadata)
    assert output.dtype == case.dtype
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(output.float(), expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(arena.float().nan_to_num(9.0), expected_arena.nan_to_num(9.0))


def long_case(num_kv_heads: int = 1, options: AttentionOptions | None = None) -> Case:
    segments = [
        Segment(0, 0, 5000, 5001),
        Segment(1, 1, 20, 21),
        Segment(3, 2, 1000, 1300),
    ]
    return Case(
        segments, [], num_kv_heads, 2, 64, 64, torch.float32, False, options or AttentionOptions()
    )


@pytest.mark.skipif(not start_threads_address(), reason="torch has no OpenMP here")
@pytest.mark.parametrize("num_threads", [2, 5])
@pytest.mark.parametrize("window", [None, 700])
def test_several_threads_cut_a_long_request_and_merge_it(
    num_threads: int, window: int | None
) -> None:
    case = long_case(options=AttentionOptions(sliding_window=window))
    generator = torch.Generator().manual_seed(0)
    arena = make_arena(case, generator)
    rows = random_rows(case, generator)
    expected, _ = expected_of(case, arena, rows)
    backend = HostAttention(layers_of(case, arena))
    torch.set_num_threads(num_threads)
    try:
        metadata = AttentionMetadata.build(case.segments, CPU)
        output = backend.forward(1, *rows, case.options, metadata)
    finally:
        torch.set_num_threads(1)
    torch.testing.assert_close(output, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("window", "reads_shared"), [(306, True), (305, False), (None, True)])
def test_a_range_is_shared_until_a_window_has_left_a_part_of_it(
    window: int | None, reads_shared: bool
) -> None:
    """The slot that a range is read from has other numbers than the members: seen if it is read."""
    segments = [Segment(i, i, 300 + i, 301 + i) for i in range(6)]
    shared = [SharedRange(0, 0, 256, (1, 2, 3, 4, 5))]
    options = AttentionOptions(sliding_window=window)
    case = Case(segments, [], 2, 4, 64, 64, torch.float32, False, options)
    generator = torch.Generator().manual_seed(1)
    backend = HostAttention(layers_of(case, make_arena(case, generator)))
    rows = random_rows(case, generator)
    plain = AttentionMetadata.build(segments, CPU)
    alone = backend.forward(0, *rows, options, plain)
    together = backend.forward(0, *rows, options, dataclasses.replace(plain, shared=tuple(shared)))
    assert torch.equal(alone[0], together[0])
    assert torch.equal(alone, together) == (not reads_shared)


def test_sharing_changes_nothing_but_the_order_of_additions() -> None:
    segments = [Segment(i, i, 300 + i, 301 + i) for i in range(6)]
    shared = [SharedRange(2, 0, 256, (0, 1, 2, 3, 4, 5)), SharedRange(4, 256, 288, (3, 4))]
    case = Case(segments, shared, 2, 4, 64, 64, torch.float32, False, AttentionOptions())
    generator = torch.Generator().manual_seed(1)
    arena = make_arena(case, generator)
    rows = random_rows(case, generator)
    backend = HostAttention(layers_of(case, arena))
    plain = AttentionMetadata.build(segments, CPU)
    alone = backend.forward(0, *rows, case.options, plain)
    together = backend.forward(
        0, *rows, case.options, dataclasses.replace(plain, shared=tuple(shared))
    )
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cut", [64, 77, 130])
def test_a_token_is_the_same_bits_in_whatever_chunk_of_its_prompt(
    isa: str, dtype: torch.dtype, cut: int
) -> None:
    """Scores grow with the position, so that the maxima of the softmax are raised often."""
    whole = Case([Segment(0, 0, 150, 350)], [], 2, 2, 64, 64, dtype, False, AttentionOptions())
    generator = torch.Generator().manual_seed(cut)
    arena = make_arena(whole, generator)
    q, k, v = random_rows(whole, generator)
    q, k = 4 * q, k * torch.linspace(0.1, 3, 200)[:, None].to(dtype)

    def outputs_of(*chunks: Segment) -> torch.Tensor:
        backend = HostAttention(layers_of(whole, copy_of(arena)), isa)
        parts = []
        for chunk in chunks:
            rows = (part[:, chunk.start - 150 : chunk.end - 150] for part in (q, k, v))
            metadata = AttentionMetadata.build([chunk], CPU)
            parts.append(backend.forward(0, *rows, whole.options, metadata))
        return torch.cat(parts)

    at_once = outputs_of(*whole.segments)
    in_two = outputs_of(Segment(0, 0, 150, 150 + cut), Segment(0, 0, 150 + cut, 350))
    assert torch.equal(at_once, in_two)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_numbers_that_are_none_stay_in_their_request(isa: str, dtype: torch.dtype) -> None:
    """The first request's keys and values were packed where those of the second one are then."""
    both = [Segment(0, 0, 0, 300), Segment(1, 300, 5, 45)]
    case = Case(both, [], 2, 2, 64, 64, dtype, False, AttentionOptions())
    generator = torch.Generator().manual_seed(3)
    arena = make_arena(case, generator)
    q, k, v = random_rows(case, generator)
    k[:, :300] = v[:, :300] = torch.nan

    def output_of(segments: list[Segment], first: int) -> torch.Tensor:
        backend = HostAttention(layers_of(case, copy_of(arena)), isa)
        rows = (part[:, first:] for part in (q, k, v))
        return backend.forward(1, *rows, case.options, AttentionMetadata.build(segments, CPU))

    alone = output_of([Segment(1, 0, 5, 45)], 300)
    together = output_of(both, 0)
    assert together[:300].isnan().all()
    assert torch.equal(together[300:], alone)


def test_nothing_beyond_a_request_is_read_or_written() -> None:
    case = long_case(num_kv_heads=2)
    generator = torch.Generator().manual_seed(2)
    arena = make_arena(case, generator)
    output = HostAttention(layers_of(case, arena)).forward(
        1, *random_rows(case, generator), case.options, AttentionMetadata.build(case.segments, CPU)
    )
    assert not output.isnan().any()
    assert all(arena[:, s.slot, s.end :].isnan().all() for s in case.segments)
