"""Two-phase attention equals one call per request, whatever the requests share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st

from flexinfer import LLM, SamplingParams
from flexinfer.attention import host, two_phase
from flexinfer.attention.base import AttentionMetadata, AttentionOptions, LayerKV
from flexinfer.attention.sdpa import SdpaAttention
from flexinfer.attention.segments import Segment, SharedRange
from flexinfer.attention.sharing_cost import SharingCost, choose_ranges
from flexinfer.attention.two_phase import TwoPhaseAttention, merge_partial
from flexinfer.attention.two_phase_flash import FlashPartial, suffix_groups
from flexinfer.runner import inputs
from helpers.flash_reference import FlashAttn2
from helpers.sharing_forests import random_batch
from helpers.tiny_models import make_model, random_prompts, reference

torch.set_num_threads(1)
MAX_SEQ_LEN, HEAD_DIM = 80, 16
CPU = torch.device("cpu")
ALWAYS = SharingCost(1, 1, 0, 0)
SOME = SharingCost(1, 1, 8, 1)


def make_arena(
    segments: list[Segment], ranges: list[SharedRange], num_kv_heads: int, dtype: torch.dtype
) -> list[LayerKV]:
    """Two interleaved layers; a shared range holds the same numbers in all its members' slots."""
    shape = (len(segments), MAX_SEQ_LEN, 2, 2, num_kv_heads, HEAD_DIM)
    arena = torch.randn(shape).to(dtype)
    for shared in ranges:
        slots = [segments[i].slot for i in shared.members]
        arena[slots, shared.start : shared.end] = arena[
            shared.slot, shared.start : shared.end
        ].clone()
    for s in segments:
        arena[s.slot, s.start :] = torch.nan
    return [LayerKV(arena[:, :, i, 0], arena[:, :, i, 1]) for i in range(2)]


def hide_other_copies(layer: LayerKV, segments: list[Segment], calls: list[SharedRange]) -> None:
    """Make what the chunk-first phase must not read in a member's own slot unreadable."""
    for shared in calls:
        for i in shared.members:
            if segments[i].slot != shared.slot:
                layer.k[segments[i].slot, shared.start : shared.end] = torch.nan
                layer.v[segments[i].slot, shared.start : shared.end] = torch.nan


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(2, 10),
    heads=st.sampled_from([(1, 1), (2, 3), (4, 1)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    scaling=st.sampled_from([None, 0.5]),
    cost=st.sampled_from([ALWAYS, SOME]),
)
def test_a_mixed_batch_equals_one_call_a_request(
    seed: int,
    size: int,
    heads: tuple[int, int],
    dtype: torch.dtype,
    scaling: float | None,
    cost: SharingCost,
) -> None:
    torch.manual_seed(seed)
    segments, ranges = random_batch(Random(seed), size)
    layers = make_arena(segments, ranges, heads[0], dtype)
    calls = choose_ranges(ranges, segments, cost)
    metadata = AttentionMetadata.build(segments, CPU, calls)
    num_tokens = segments[-1].row + segments[-1].num_tokens
    q = torch.randn(heads[0] * heads[1], num_tokens, HEAD_DIM).to(dtype)
    k, v = torch.randn(2, heads[0], num_tokens, HEAD_DIM).to(dtype)
    options = AttentionOptions(scaling=scaling)
    expected = SdpaAttention(layers).forward(1, q, k, v, options, metadata)
    readers_alone = [i for i, s in enumerate(segments) if s.num_tokens > 1]
    if not any({*shared.members} & {*readers_alone} for shared in ranges):
        hide_other_copies(layers[1], segments, calls)
    output = TwoPhaseAttention(layers).forward(1, q, k, v, options, metadata)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(output, expected, atol=tolerance, rtol=tolerance)


def shared_decodes(lengths: list[int], shared: int) -> tuple[list[Segment], list[SharedRange]]:
    segments = [Segment(i, i, length, length + 1) for i, length in enumerate(lengths)]
    return segments, [SharedRange(0, 0, shared, tuple(range(len(lengths))))]


@pytest.mark.parametrize(
    "options",
    [
        AttentionOptions(sliding_window=10),
        AttentionOptions(softcap=2.0),
        AttentionOptions(sinks=torch.linspace(-1, 1, 4)),
    ],
    ids=["window", "softcap", "sinks"],
)
def test_what_two_phases_can_not_do_goes_the_plain_way(options: AttentionOptions) -> None:
    torch.manual_seed(0)
    segments, ranges = shared_decodes([30, 40], 25)
    layers = make_arena(segments, ranges, 2, torch.float32)
    metadata = AttentionMetadata.build(segments, CPU, ranges)
    q, kv = torch.randn(4, 2, HEAD_DIM), torch.randn(2, 2, HEAD_DIM)
    output = TwoPhaseAttention(layers).forward(0, q, kv, kv, options, metadata)
    expected = SdpaAttention(layers).forward(0, q, kv, kv, options, metadata)
    assert torch.equal(output, expected)


def test_a_window_that_cuts_nothing_is_shared() -> None:
    segments, ranges = shared_decodes([30, 40], 25)
    plan = two_phase.TwoPhasePlan.build(AttentionMetadata.build(segments, CPU, ranges))
    assert plan is not None
    layer = make_arena(segments, ranges, 2, torch.float32)[0]
    longest = segments[1].end
    assert plan.allows(layer, AttentionOptions(sliding_window=longest))
    assert not plan.allows(layer, AttentionOptions(sliding_window=longest - 1))
    assert plan.allows(layer, AttentionOptions(chunk=longest))
    assert not plan.allows(layer, AttentionOptions(chunk=longest - 1))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Whatever a test before has set: torch's kernel has a scratch for each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_a_shared_range_is_one_kernel_call_and_is_not_copied() -> None:
    segments, ranges = shared_decodes([70] * 8, 64)
    layers = make_arena(segments, ranges, 2, torch.float32)
    backend = TwoPhaseAttention(layers)
    metadata = AttentionMetadata.build(segments, CPU, ranges)
    q, kv = torch.randn(4, 8, HEAD_DIM), torch.randn(2, 8, HEAD_DIM)
    with torch.profiler.profile(profile_memory=True) as profile:
        backend.forward(0, q, kv, kv, AttentionOptions(), metadata)
    calls = [e for e in profile.key_averages() if "flash_attention_for_cpu" in e.key]
    assert [event.count for event in calls] == [1 + 8]
    partials = 8 * 4 * HEAD_DIM * 4  # what all requests' partial results take
    assert max(event.cpu_memory_usage for event in profile.events()) <= 4 * partials


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    cuts=st.lists(st.integers(1, 59), max_size=4, unique=True),
    spread=st.sampled_from([1.0, 30.0]),
)
def test_merged_parts_equal_the_softmax_over_all_keys(
    seed: int, cuts: list[int], spread: float
) -> None:
    torch.manual_seed(seed)
    q = torch.randn(1, 3, 5, HEAD_DIM) * spread
    k, v = torch.randn(2, 1, 3, 60, HEAD_DIM)
    kernel = two_phase._cpu_flash
    bounds = [0, *sorted(cuts), 60]
    parts = [kernel(q, k[:, :, a:b], v[:, :, a:b], None) for a, b in pairwise(bounds)]
    output, lse = (t.clone() for t in parts[0])
    for part, part_lse in parts[1:]:
        merge_partial(output, lse, slice(None), part, part_lse)
    scores = q.double() @ k.double().mT / HEAD_DIM**0.5
    expected = scores.softmax(-1) @ v.double()
    torch.testing.assert_close(output.double(), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=1e-4, rtol=1e-5)


WINDOWED = ("gemma2", "gpt_oss")
"""Every other layer has a window of 16 tokens, shorter than every prompt; mistral's all have it."""
SHARING_WINDOWS: dict[tuple[str, str], set[int | None]] = {
    **{(name, "host"): {None} for name in ("llama", "gpt_neox", "qwen3", "gemma2", "gpt_oss")},
    **{(name, "two_phase"): {None} for name in ("llama", "gpt_neox", "qwen3")},
    # Torch's kernels know neither soft caps nor sinks, and what a window cuts is never shared.
    **{(name, "two_phase"): set() for name in ("gemma2", "gpt_oss", "mistral")},
    ("mistral", "host"): set(),
}
"""(model, backend) -> the windows of the layers in which ranges are shared; None: without one."""


def record_sharing(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int | None, bool]]:
    """Whatever a layer decides in a step that has ranges: (its window, whether it shares them)."""
    uses: list[tuple[int | None, bool]] = []
    make_plan, allows = host.make_plan, two_phase.TwoPhasePlan.allows

    def recording_plan(segments: Any, shared: Any, *args: Any) -> Any:
        uses.append((args[2].sliding_window, len(shared) > 0))
        return make_plan(segments, shared, *args)

    def recording_allows(plan: Any, layer: LayerKV, options: AttentionOptions) -> bool:
        allowed = allows(plan, layer, options)
        uses.append((options.sliding_window, allowed))
        return allowed

    monkeypatch.setattr(host, "make_plan", recording_plan)
    monkeypatch.setattr(two_phase.TwoPhasePlan, "allows", recording_allows)
    return uses


@pytest.mark.parametrize("layers_per_plane", [None, 1])
@pytest.mark.parametrize("backend", ["two_phase", "host"])
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "qwen3", "mistral", "gemma2", "gpt_oss"])
def test_greedy_output_is_that_of_transformers(
    name: str, backend: str, layers_per_plane: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts with nested common heads, over several turns, every range shared that can be."""
    num_calls: list[int] = []

    def choose_all(
        ranges: list[SharedRange], segments: list[Segment], cost: SharingCost
    ) -> list[SharedRange]:
        free = replace(ALWAYS, max_query_tokens=cost.max_query_tokens)
        chosen = choose_ranges(ranges, segments, free)
        num_calls.append(len(chosen))
        return chosen

    monkeypatch.setattr(inputs, "choose_ranges", choose_all)
    uses = record_sharing(monkeypatch)
    trunk, *tails = random_prompts((40, 13, 7, 30, 22, 9, 16))
    branch = trunk + tails[2]
    prompts = [trunk + tails[0], trunk + tails[1], branch + tails[3], branch + tails[4], tails[5]]
    llm = LLM(
        make_model(name),
        skip_tokenizer_init=True,
        max_num_seqs=8,
        kv_cache_memory_bytes=64 << 20,
        chunk_bytes=4096,
        layers_per_plane=layers_per_plane,
        attention_backend=backend,
    )
    with llm:
        for _turn in range(2):
            outputs = llm.generate(
                prompts, SamplingParams(temperature=0, max_tokens=10), use_tqdm=False
            )
            answers = [output.outputs[0].token_ids for output in outputs]
            assert answers == [reference(name, tuple(prompt), 10) for prompt in prompts]
            prompts = [p + a + [5] for p, a in zip(prompts, answers, strict=True)]
        llm.llm_engine.manager.check_integrity()
    assert {window for window, shares in uses if shares} == SHARING_WINDOWS[name, backend]
    asked = {window for window, _ in uses}
    if name == "mistral":  # dense rows of 16 tokens have been given back before a step can share
        assert asked == {16} or (layers_per_plane == 1 and not asked)
    else:
        assert max(num_calls) >= 2
        assert asked == ({None, 16} if name in WINDOWED else {None})


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(2, 10),
    heads=st.sampled_from([(1, 1), (2, 3)]),
    cost=st.sampled_from([ALWAYS, SOME]),
)
def test_calls_of_flash_attn_give_the_same(
    seed: int, size: int, heads: tuple[int, int], cost: SharingCost
) -> None:
    torch.manual_seed(seed)
    segments, ranges = random_batch(Random(seed), size, decode_share=1)
    layers = make_arena(segments, ranges, heads[0], torch.bfloat16)
    metadata = AttentionMetadata.build(segments, CPU, choose_ranges(ranges, segments, cost))
    q = torch.randn(heads[0] * heads[1], size, HEAD_DIM).bfloat16()
    k, v = torch.randn(2, heads[0], size, HEAD_DIM).bfloat16()
    expected = SdpaAttention(layers).forward(1, q, k, v, AttentionOptions(), metadata)
    backend = TwoPhaseAttention(layers, FlashPartial(FlashAttn2().flash_attn_with_kvcache))
    for _layer in range(2):
        output = backend.forward(1, q, k, v, AttentionOptions(), metadata)
        torch.testing.assert_close(output, expected, atol=2e-2, rtol=2e-2)


def test_suffixes_that_start_together_are_one_call() -> None:
    segments, ranges = shared_decodes([30, 40, 33], 25)
    plan = two_phase.TwoPhasePlan.build(AttentionMetadata.build(segments, CPU, ranges))
    assert plan is not None
    groups = suffix_groups(plan, CPU)
    assert len(groups) == 1
    assert groups[0].lengths.tolist() == [6, 16, 9]
    assert groups[0].slots.tolist() == [0, 1, 2]
    assert (groups[0].start, groups[0].max_end) == (25, 41)
