"""Attention through flash-attn's functions equals SDPA, for any mixed batch.

There is no GPU here: references with the real functions' demands stand in their place.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from random import Random
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st

from flash_reference import FlashAttn2, FlashAttn3, FlashAttn4, TorchOperator
from flexinfer import attention
from flexinfer.attention import choose
from flexinfer.attention.base import (
    AttentionMetadata,
    AttentionOptions,
    LayerKV,
    Segment,
    SharedRange,
)
from flexinfer.attention.flash import FlashAttention
from flexinfer.attention.flash_kernels import (
    DecodeKernel,
    DecodeStep,
    Flash2,
    Flash3,
    Flash4,
    PrefillKernel,
    Scores,
    TorchFlash,
    count_rows_per_slot,
    flat_rows,
)
from flexinfer.attention.sdpa import SdpaAttention, folded_sdpa, make_band
from flexinfer.attention.sharing_cost import SharingCost, choose_ranges
from flexinfer.attention.two_phase_flash import FlashPartial, cuda_cost
from sharing_forests import random_batch

torch.set_num_threads(1)
HEAD_DIM, MAX_SEQ_LEN, NUM_SLOTS = 8, 300, 6
EXACT = (torch.float32,)

Kernels = tuple[DecodeKernel, PrefillKernel]


def flash2(dtypes: tuple[torch.dtype, ...] = EXACT) -> Kernels:
    kernel = Flash2(FlashAttn2(dtypes))
    return kernel, kernel


def flash3(dtypes: tuple[torch.dtype, ...] = EXACT) -> Kernels:
    return Flash2(FlashAttn2(dtypes)), Flash3(FlashAttn3(dtypes))


def flash4(dtypes: tuple[torch.dtype, ...] = EXACT) -> Kernels:
    return Flash2(FlashAttn2(dtypes)), Flash4(FlashAttn4(dtypes))


def torch_flash(dtypes: tuple[torch.dtype, ...] = EXACT) -> Kernels:
    kernel = TorchFlash(TorchOperator(dtypes))
    return kernel, kernel


KINDS = {"flash2": flash2, "flash3": flash3, "flash4": flash4, "torch": torch_flash}


def make_layers(num_kv_heads: int, dtype: torch.dtype = torch.float32) -> list[LayerKV]:
    """Interleaved arenas of two layers: token stride spans both; unwritten rows are NaN."""
    shape = (NUM_SLOTS, MAX_SEQ_LEN, 2, 2, num_kv_heads, HEAD_DIM)
    arena = torch.full(shape, torch.nan, dtype=dtype)
    return [LayerKV(arena[:, :, i, 0], arena[:, :, i, 1]) for i in range(2)]


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


# Sharing.

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


def test_calls_that_share_are_tried_before_they_are_used() -> None:
    class WrongLse(FlashAttn2):
        @wraps(FlashAttn2.flash_attn_with_kvcache)
        def flash_attn_with_kvcache(self, *args: Any, **kwargs: Any) -> Any:
            result = FlashAttn2.flash_attn_with_kvcache(self, *args, **kwargs)
            return (result[0], 2 * result[1]) if isinstance(result, tuple) else result

    backend, reasons = choose.choose(half_layers(), [candidate("a", good2)])
    assert backend.sharing_cost is not None
    assert not reasons
    backend, reasons = choose.choose(half_layers(), [candidate("a", lambda: Flash2(WrongLse()))])
    assert isinstance(backend, FlashAttention)
    assert backend.sharing_cost is None
    assert reasons[0].startswith("two-phase attention gives wrong results here (off by ")


def test_a_version_without_log_sum_exp_decodes_but_does_not_share() -> None:
    class Older(FlashAttn2):
        def flash_attn_with_kvcache(  # type: ignore[override]
            self, q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, cache_seqlens: Any,
            cache_batch_idx: Any, softmax_scale: float, causal: bool, window_size: tuple[int, int],
            softcap: float,
        ) -> Any:  # fmt: skip
            return FlashAttn2.flash_attn_with_kvcache(
                self, q, k_cache, v_cache, k, v, cache_seqlens=cache_seqlens,
                cache_batch_idx=cache_batch_idx, softmax_scale=softmax_scale, causal=causal,
                window_size=window_size, softcap=softcap,
            )  # fmt: skip

    backend, reasons = choose.choose(half_layers(), [candidate("a", lambda: Flash2(Older()))])
    assert isinstance(backend, FlashAttention)
    assert backend.sharing_cost is None
    assert reasons == [
        "two-phase attention can not be used: flash_attn_with_kvcache has no argument "
        "return_softmax_lse: too old"
    ]


# Choosing.


def candidate(name: str, load: Callable[[], Any]) -> choose.Candidate:
    return choose.Candidate(name, load)


def fail(error: Exception) -> Callable[[], Any]:
    def load() -> Any:
        raise error

    return load


def half_layers() -> list[LayerKV]:
    return make_layers(2, torch.bfloat16)


def good2() -> Flash2:
    return Flash2(FlashAttn2(), "2.8.3")


def good3() -> Flash3:
    return Flash3(FlashAttn3(), "3.0")


def test_the_first_kernel_that_works_is_taken_for_each_job() -> None:
    backend, reasons = choose.choose(half_layers(), [candidate("a", good3), candidate("b", good2)])
    assert isinstance(backend, FlashAttention)
    assert backend.name == "decode: flash-attn 2.8.3, prefill: flash-attn 3.0"
    assert reasons == []


def test_torch_alone_does_both_jobs() -> None:
    load = candidate("torch", lambda: TorchFlash(TorchOperator()))
    backend, reasons = choose.choose(half_layers(), [load])
    assert isinstance(backend, FlashAttention)
    assert not reasons


class WrongResults(FlashAttn2):
    @wraps(FlashAttn2.flash_attn_func)
    def flash_attn_func(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return FlashAttn2.flash_attn_func(self, *args, **{**kwargs, "causal": False})


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (fail(ModuleNotFoundError("No module", name="a")), "a is not installed"),
        (
            fail(ModuleNotFoundError("No module", name="cutlass")),
            "a needs cutlass, which is not installed",
        ),
        (
            fail(ImportError("flash_attn_2_cuda.so: undefined symbol: _ZN3c10\nmore")),
            "a can not be used: flash_attn_2_cuda.so: undefined symbol: _ZN3c10",
        ),
        (lambda: Flash2(ModuleType("a")), "a can not be used: module 'a' has no attribute"),
    ],
)
def test_what_can_not_be_loaded_is_named_with_the_reason(
    load: Callable[[], Any], reason: str
) -> None:
    backend, reasons = choose.choose(half_layers(), [candidate("a", load)])
    assert isinstance(backend, SdpaAttention)
    assert len(reasons) == 1
    assert reasons[0].startswith(reason)


def test_a_build_for_another_gpu_is_found_out_before_any_request() -> None:
    class OtherGpu(FlashAttn2):
        @wraps(FlashAttn2.flash_attn_varlen_func)
        def flash_attn_varlen_func(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            raise RuntimeError("CUDA error: no kernel image is available for execution\nhint")

        @wraps(FlashAttn2.flash_attn_with_kvcache)
        def flash_attn_with_kvcache(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            raise RuntimeError("CUDA error: no kernel image is available for execution\nhint")

    backend, reasons = choose.choose(
        half_layers(), [candidate("a", lambda: Flash2(OtherGpu())), candidate("b", good2)]
    )
    text = "a does not work here: CUDA error: no kernel image is available for execution"
    assert isinstance(backend, FlashAttention)
    assert "2.8.3" in backend.name
    assert reasons == [text, text]


def test_a_kernel_with_wrong_results_is_not_used() -> None:
    backend, reasons = choose.choose(
        half_layers(), [candidate("a", lambda: Flash2(WrongResults())), candidate("b", good3)]
    )
    assert isinstance(backend, FlashAttention)
    assert backend.name == "decode: flash-attn 2, prefill: flash-attn 3.0"
    assert reasons[0].startswith("a gives wrong results here (off by ")


def test_the_trial_sees_whether_new_keys_are_stored() -> None:
    class Forgets(TorchFlash):
        def decode(
            self,
            layer: LayerKV,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            metadata: AttentionMetadata,
            step: DecodeStep,
            scores: Scores,
        ) -> torch.Tensor:
            copy = LayerKV(layer.k.clone(), layer.v.clone())
            return super().decode(copy, query, key, value, metadata, step, scores)

    error = choose.try_decode(Forgets(TorchOperator()), half_layers()[0].k)
    assert error > 10 * choose.TOLERANCE


@pytest.mark.parametrize(
    ("dtype", "head_dim", "reason"),
    [
        (torch.float32, 64, "not float32"),
        (torch.bfloat16, 260, "not 260"),
        (torch.float16, 12, "not 12"),
        (torch.bfloat16, 256, None),
    ],
)
def test_head_sizes_and_dtypes_that_no_kernel_knows(
    dtype: torch.dtype, head_dim: int, reason: str | None
) -> None:
    found = choose.unsupported(torch.empty(1, 1, 1, head_dim, dtype=dtype))
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize(
    ("capability", "names"),
    [
        ((8, 0), ["flash_attn"]),
        ((9, 0), ["flash_attn_interface", "flash_attn"]),
        ((10, 0), ["flash_attn.cute", "flash_attn"]),
    ],
)
def test_packages_are_tried_as_the_gpu_deserves(
    capability: tuple[int, int], names: list[str]
) -> None:
    assert [found.name for found in choose.packages(capability)] == names


def test_an_installed_module_is_wrapped_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flash_attn")
    reference = FlashAttn2()
    for name in ("flash_attn_with_kvcache", "flash_attn_func", "flash_attn_varlen_func"):
        setattr(module, name, getattr(reference, name))
    module.__version__ = "2.8.3"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    backend, reasons = choose.choose(half_layers(), choose.packages((8, 0)))
    assert isinstance(backend, FlashAttention)
    assert not reasons
    assert backend.name == "decode: flash-attn 2.8.3, prefill: flash-attn 2.8.3"


def test_a_version_without_softcap_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    def flash_attn_with_kvcache(
        q: Any, k_cache: Any, v_cache: Any, cache_seqlens: Any, cache_batch_idx: Any
    ) -> None: ...

    module = ModuleType("flash_attn")
    module.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    _, reasons = choose.choose(half_layers(), choose.packages((8, 0)))
    assert reasons == [
        "flash_attn can not be used: flash_attn_with_kvcache has no argument softcap: too old"
    ]


def test_flash_on_a_cpu_says_what_is_taken_instead(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        backend = attention.create("flash", make_layers(1))
    assert not isinstance(backend, FlashAttention)
    assert 'needs a CUDA device: "auto" is taken' in caplog.text


@pytest.mark.parametrize(
    ("name", "known"), [("FLASH_ATTN", "flash"), ("torch_sdpa", "sdpa"), ("Auto", "auto")]
)
def test_vllms_names_are_known(name: str, known: str) -> None:
    assert attention.check_name(name) == known
