"""Replayed decode steps say what eager ones do; OpRecorder stands for CUDA's capture on the CPU."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer import LLMEngine, SamplingParams, attention
from flexinfer.attention import flash
from flexinfer.attention.base import AttentionBackend, AttentionMetadata
from flexinfer.attention.flash import FlashAttention
from flexinfer.attention.flash_kernels import Flash2
from flexinfer.attention.segments import SharedRange
from flexinfer.attention.sharing_cost import SharingCost
from flexinfer.attention.torch_flash import TorchFlash
from flexinfer.attention.two_phase_flash import FlashPartial
from flexinfer.config import EngineConfig
from flexinfer.runner import cuda_graphs
from flexinfer.runner.cuda_graphs import DecodeGraphs, choose_sizes
from flexinfer.runner.inputs import StepInputs
from helpers import engine_kit
from helpers.engine_kit import run
from helpers.flash_reference import FlashAttn2, TorchOperator
from helpers.op_recorder import OpRecorder
from helpers.tiny_models import random_prompts, reference

LIBRARY = torch.library.Library("flash_reference", "FRAGMENT")
LIBRARY.define(
    "kvcache(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, "
    "Tensor cache_seqlens, Tensor cache_batch_idx, float scale, int left, int right, "
    "float softcap) -> Tensor"
)
LIBRARY.define(
    "varlen(Tensor q, Tensor k, Tensor v, Tensor cu_q, Tensor cu_k, int max_q, int max_k, "
    "float scale, int? left, int? right, Tensor? used) -> Tensor"
)
MODULE = FlashAttn2((torch.float32,))
OPERATOR = TorchOperator((torch.float32,))


def kvcache(q: Any, kc: Any, vc: Any, k: Any, v: Any, lengths: Any, slots: Any, scale: float,
            left: int, right: int, softcap: float) -> torch.Tensor:  # fmt: skip
    return MODULE.flash_attn_with_kvcache(
        q, kc, vc, k, v, cache_seqlens=lengths, cache_batch_idx=slots, softmax_scale=scale,
        causal=True, window_size=(left, right), softcap=softcap,
    )  # fmt: skip


def varlen(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, scale: float,
           left: int | None, right: int | None, used: Any) -> torch.Tensor:  # fmt: skip
    return OPERATOR(
        q, k, v, cu_q, cu_k, max_q, max_k, 0.0, True, False, scale=scale, window_size_left=left,
        window_size_right=right, seqused_k=used,
    )[0]  # fmt: skip


LIBRARY.impl("kvcache", kvcache, "CompositeExplicitAutograd")
LIBRARY.impl("varlen", varlen, "CompositeExplicitAutograd")


class Flash2Operators(FlashAttn2):
    """Its decode is one operator, as on a GPU one kernel."""

    def flash_attn_with_kvcache(  # type: ignore[override]
        self, q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, cache_seqlens: Any,
        cache_batch_idx: Any, softmax_scale: float, causal: bool, window_size: tuple[int, int],
        softcap: float,
    ) -> torch.Tensor:  # fmt: skip
        return torch.ops.flash_reference.kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx, softmax_scale,
            *window_size, softcap,
        )  # fmt: skip


def torch_operator(
    q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, *plain: Any,
    scale: float, seqused_k: Any = None, window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    if cu_q is None:
        return OPERATOR(
            q, k, v, None, None, max_q, max_k, *plain, scale=scale,
            window_size_left=window_size_left, window_size_right=window_size_right,
        )  # fmt: skip
    return (
        torch.ops.flash_reference.varlen(
            q, k, v, cu_q, cu_k, max_q, max_k, scale, window_size_left, window_size_right,
            seqused_k,
        ),
    )  # fmt: skip


def flash2(layers: Any) -> AttentionBackend:
    kernel = Flash2(Flash2Operators((torch.float32,)))
    return FlashAttention(layers, kernel, kernel)


def torch_flash(layers: Any) -> AttentionBackend:
    kernel = TorchFlash(torch_operator)
    return FlashAttention(layers, kernel, kernel)


@pytest.fixture(params=[flash2, torch_flash])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    make: Callable[[Any], AttentionBackend] = request.param
    monkeypatch.setattr(attention, "create", lambda name, layers: make(layers))
    return


def make_engine(name: str = "llama", **settings: Any) -> LLMEngine:
    """Its slots are whole numbers of tokens, as they are on a GPU."""
    defaults = {"max_num_seqs": 6, "kv_cache_memory_bytes": 8 << 20, "chunk_bytes": 32768}
    return engine_kit.make_engine(name, **{**defaults, **settings})


def capture(engine: LLMEngine, sizes: list[int]) -> OpRecorder:
    recorder = OpRecorder()
    vtensor = engine.manager.create()
    engine.runner.capture_graphs(vtensor, recorder, sizes)
    vtensor.release()
    return recorder


PROMPTS = random_prompts((9, 4, 30, 6, 11, 1, 17, 3), seed=11)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("sizes", [[1, 2, 4, 6], [4], [3, 5]])
def test_replayed_steps_give_the_tokens_of_transformers(name: str, sizes: list[int]) -> None:
    engine = make_engine(name)
    recorder = capture(engine, sizes)
    final = run(engine, PROMPTS, num_new=12)
    for i, prompt in enumerate(PROMPTS):
        assert final[str(i)].outputs[0].token_ids == reference(name, tuple(prompt), 12)
    assert recorder.num_records == len(sizes)
    assert recorder.num_replays > 8
    engine.close()


@pytest.mark.usefixtures("backend")
def test_graphs_go_on_after_preemption_swap_and_sleep() -> None:
    engine = make_engine(preemption_mode="swap", swap_space="8MiB", kv_cache_memory_bytes=5 * 32768)
    recorder = capture(engine, [1, 2, 4, 6])
    params = SamplingParams(temperature=0, max_tokens=30)
    prompts = [prompt[:11] for prompt in PROMPTS]
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    final, num_steps = {}, 0
    while engine.has_unfinished_requests():
        num_steps += 1
        if num_steps == 7:
            engine.sleep()
            engine.wake_up()
        for output in engine.step():
            final[output.request_id] = output
    for i, prompt in enumerate(prompts):
        assert final[str(i)].outputs[0].token_ids == reference("llama", tuple(prompt), 30)
    assert engine.stats().preemptions["swap"]
    assert recorder.num_replays > 10
    engine.close()


def inputs(lengths: list[int], slots: list[int], num_decodes: int | None = None) -> StepInputs:
    from flexinfer.attention.segments import Segment

    segments = [
        Segment(slot, row, n - 1, n)
        for row, (slot, n) in enumerate(zip(slots, lengths, strict=True))
    ]
    device = torch.device("cpu")
    metadata = AttentionMetadata.build(segments, device)
    ids = torch.arange(len(lengths)) + 50
    return StepInputs(ids, metadata.decode_positions, torch.tensor([0]), metadata)


class Seen:
    """A model that gives back what it is shown, one column a tensor."""

    def __init__(self) -> None:
        self.bounds: list[tuple[int, int]] = []

    def __call__(self, step: StepInputs) -> torch.Tensor:
        segments = step.metadata.segments
        self.bounds.append((len(segments), segments[0].end))
        columns = (step.token_ids, step.positions, step.metadata.decode_slots)
        return torch.stack(columns, dim=1) + 0


def make_graphs(sizes: list[int], max_seq_len: int = 100) -> tuple[DecodeGraphs, Seen, OpRecorder]:
    seen, recorder = Seen(), OpRecorder()
    graphs = DecodeGraphs(seen, recorder, sizes, max_seq_len, torch.device("cpu"))
    assert graphs.capture(slot=2)
    return graphs, seen, recorder


def test_padding_rows_repeat_the_shortest_request() -> None:
    graphs, _, _ = make_graphs([2, 8])
    step = inputs([30, 7, 12], [4, 1, 3])
    step.logits_rows.resize_(8).copy_(torch.arange(8))
    shown = graphs.run(step).tolist()
    assert shown[:3] == [[50, 29, 4], [51, 6, 1], [52, 11, 3]]
    assert shown[3:] == [[51, 6, 1]] * 5


def test_only_rows_that_sample_are_returned_and_are_no_view_of_the_graph() -> None:
    graphs, _, _ = make_graphs([4])
    step = inputs([30, 7, 12], [4, 1, 3])
    step.logits_rows.resize_(2).copy_(torch.tensor([2, 0]))
    first = graphs.run(step)
    graphs.run(inputs([5], [0]))
    assert first.tolist() == [[52, 11, 3], [50, 29, 4]]


def test_what_is_no_small_decode_step_is_computed_eagerly() -> None:
    graphs, _, _ = make_graphs([1, 2])
    assert graphs.accepts(inputs([5, 9], [0, 1]))
    assert not graphs.accepts(inputs([5, 9, 3], [0, 1, 2]))
    mixed = inputs([5, 9], [0, 1])
    object.__setattr__(mixed.metadata, "num_decodes", 1)
    assert not graphs.accepts(mixed)
    assert not graphs.accepts(inputs([], []))


def test_a_step_leaves_its_graph_only_where_sharing_saves_more() -> None:
    cost = SharingCost(token_bytes=1, bytes_per_us=1, call_us=10, merge_us=1)
    graphs = DecodeGraphs(Seen(), OpRecorder(), [2], 10000, torch.device("cpu"), cost)
    assert graphs.capture(slot=0)
    least = int(cuda_graphs.GRAPH_GAIN_US) + 12  # of tokens read once less, for one call, two parts
    for end, is_replayed in ((least, True), (least + 1, False)):
        step = inputs([9000, 9000], [0, 1])
        shared = [SharedRange(0, 0, end, (0, 1))]
        step = replace(step, metadata=replace(step.metadata, shared=shared))
        assert graphs.accepts(step) == is_replayed


@pytest.mark.parametrize("graph_gain_us", [0.0, 1e9])
def test_steps_that_share_and_steps_that_are_replayed_give_the_tokens_of_transformers(
    graph_gain_us: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversation's prompts share their heads: in two phases, or from graphs, or by turns."""
    module = FlashAttn2((torch.float32,))
    num_calls: list[int] = []

    class Watch(FlashPartial):
        def shared(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
            num_calls.append(1)
            return super().shared(*arguments)

    def make(layers: Any) -> AttentionBackend:
        kernel = Flash2(Flash2Operators((torch.float32,)))
        return FlashAttention(layers, kernel, kernel, Watch(module.flash_attn_with_kvcache))

    free = SharingCost(token_bytes=1, bytes_per_us=1, call_us=0, merge_us=0)
    monkeypatch.setattr(attention, "create", lambda name, layers: make(layers))
    monkeypatch.setattr(flash, "cuda_cost", lambda layer: free)
    monkeypatch.setattr(cuda_graphs, "GRAPH_GAIN_US", graph_gain_us)
    trunk, *tails = random_prompts((40, 13, 7, 30, 22), seed=5)
    prompts = [trunk + tail for tail in tails] + [tails[2]]
    engine = make_engine(chunk_bytes=4096)
    recorder = capture(engine, [1, 2, 4, 6])
    run(engine, prompts[:1], num_new=1)  # recorded: the others alias its chunks
    final = run(engine, prompts, num_new=12)
    for i, prompt in enumerate(prompts):
        assert final[str(i)].outputs[0].token_ids == reference("llama", tuple(prompt), 12)
    if graph_gain_us:
        assert recorder.num_replays >= 10
    else:
        assert len(num_calls) > 10
    engine.close()


def test_small_batches_have_graphs_for_several_lengths() -> None:
    graphs, seen, recorder = make_graphs([8, 24], max_seq_len=10000)
    assert recorder.num_records == len(graphs) == 3
    assert set(seen.bounds) == {(8, 4096), (8, 10000), (24, 10000)}
    for longest, expected in ((4096, (8, 4096)), (4097, (8, 10000))):
        replays: list[int] = []
        graphs._graphs[expected] = lambda replays=replays: replays.append(1)
        graphs.run(inputs([longest], [3]))
        assert replays == [1]


def test_graphs_keep_no_logits_of_their_own() -> None:
    kept: list[weakref.ref[torch.Tensor]] = []

    def forward(step: StepInputs) -> torch.Tensor:
        logits = step.token_ids[:, None] + torch.zeros(1, 5)
        kept.append(weakref.ref(logits))
        return logits

    class Twice:
        def record(self, function: Callable[[], None]) -> Callable[[], None]:
            function()
            function()
            return function

    graphs = DecodeGraphs(forward, Twice(), [1, 2, 4], 100, torch.device("cpu"))
    assert graphs.capture(slot=0)
    assert [logits() for logits in kept] == [None] * 6
    step = inputs([30, 7, 12], [4, 1, 3])
    step.logits_rows.resize_(3).copy_(torch.arange(3))
    assert graphs.run(step).tolist() == [[50] * 5, [51] * 5, [52] * 5]


def test_a_capture_that_fails_is_told_once_and_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def forward(step: StepInputs) -> torch.Tensor:
        if step.token_ids.shape[0] == 2:
            raise RuntimeError("operation not permitted when stream is capturing\nhint")
        return step.token_ids[:, None]

    graphs = DecodeGraphs(forward, OpRecorder(), [1, 2, 4], 100, torch.device("cpu"))
    with caplog.at_level(logging.WARNING):
        assert not graphs.capture(slot=0)
    assert len(graphs) == 0
    assert not graphs.accepts(inputs([5], [0]))
    assert [record.message.count("not permitted") for record in caplog.records] == [1]


def test_attention_that_goes_request_by_request_has_no_graphs() -> None:
    engine = make_engine(attention_backend="sdpa")
    assert capture(engine, [1, 2]).num_records == 0
    assert engine.runner.graphs is None
    engine.close()


@pytest.mark.usefixtures("backend")
def test_a_layer_that_the_kernels_do_not_know_has_no_graphs() -> None:
    engine = make_engine("gpt_oss")  # sinks
    assert capture(engine, [1, 2]).num_records == 0
    engine.close()


@pytest.mark.parametrize(
    ("wanted", "max_num_seqs", "sizes"),
    [
        (None, 1, [1]),
        (None, 6, [1, 2, 4, 6]),
        (None, 20, [1, 2, 4, 8, 16, 20]),
        ((64, 3, 3), 10, [3]),
    ],
)
def test_which_sizes_are_captured(
    wanted: tuple[int, ...] | None, max_num_seqs: int, sizes: list[int]
) -> None:
    assert choose_sizes(wanted, max_num_seqs) == sizes


@pytest.mark.parametrize(
    ("sizes", "message"),
    [([], "no batch size up to"), ([99], "no batch size up to"), ([0], "each of cuda_graph_sizes")],
)
def test_impossible_graph_sizes(sizes: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(model="x", max_num_seqs=4, cuda_graph_sizes=tuple(sizes))


def test_graphs_are_for_cuda_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "CudaRecorder", lambda *_: pytest.fail("captured on a CPU"))
    engine = make_engine()
    assert run(engine, PROMPTS[:1], 3)["0"].finished
    engine.close()
