"""What the host kernel refuses, and what is computed by SDPA in its place."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from flexinfer import LLM, SamplingParams, attention
from flexinfer.attention.base import AttentionMetadata, AttentionOptions, LayerKV
from flexinfer.attention.host import HostAttention
from flexinfer.attention.sdpa import SdpaAttention
from flexinfer.attention.segments import Segment, SharedRange
from helpers.tiny_models import CONFIGS, random_prompts

torch.set_num_threads(1)
NUM_SLOTS = 8
CPU = torch.device("cpu")


def some_layers(head_dim: int = 16, dtype: torch.dtype = torch.float32) -> list[LayerKV]:
    arena = torch.zeros(2, 2, NUM_SLOTS, 10, 1, head_dim, dtype=dtype)
    return [LayerKV(arena[0, i], arena[1, i]) for i in range(2)]


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        (some_layers(head_dim=24), "head size 24"),
        (some_layers(head_dim=592), "head size 592"),
        (some_layers(dtype=torch.float64), "dtype float64"),
        ([LayerKV(some_layers()[0].k, some_layers(32)[0].k[..., ::2])], "not dense"),
        ([LayerKV(some_layers()[0].k, some_layers()[0].k[:, :5])], "differ in dtype, slots"),
    ],
)
def test_what_it_can_not_do_goes_to_sdpa_with_one_warning(
    layers: list[LayerKV], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        backend = attention.create("auto", layers)
    assert isinstance(backend, SdpaAttention)
    assert len(caplog.records) == 1
    assert reason in caplog.text
    with pytest.raises(ValueError, match=reason):
        HostAttention(layers)


def test_auto_takes_the_host_kernel_on_the_cpu() -> None:
    assert isinstance(attention.create("auto", some_layers()), HostAttention)


def test_an_unknown_simd_level_is_refused_with_the_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"no instruction set 'mmx'.*portable"):
        HostAttention(some_layers(), "mmx")
    monkeypatch.setenv("FLEXINFER_SIMD", "portable")
    assert HostAttention(some_layers()).isa == "portable"


@pytest.mark.parametrize(
    "segments",
    [
        [Segment(NUM_SLOTS, 0, 3, 4)],  # no such slot
        [Segment(0, 0, 9, 11)],  # longer than a slot
        [Segment(0, 1, 3, 4)],  # not the first row
        [Segment(0, 0, 3, 3)],  # no tokens
    ],
)
def test_a_step_that_does_not_fit_the_arena_is_refused(segments: list[Segment]) -> None:
    rows = [torch.zeros(1, max(segments[0].num_tokens, 1), 16)] * 3
    metadata = AttentionMetadata.build(segments, CPU)
    with pytest.raises(ValueError, match="plan"):
        HostAttention(some_layers()).forward(0, *rows, AttentionOptions(), metadata)


@pytest.mark.parametrize(
    "shared",
    [
        SharedRange(0, 0, 4, (0, 1)),  # reaches into new tokens
        SharedRange(0, 2, 2, (0, 1)),  # empty
        SharedRange(0, 0, 2, (0, 7)),  # no such member
    ],
)
def test_shared_ranges_that_contradict_the_segments_are_refused(shared: SharedRange) -> None:
    segments = [Segment(0, 0, 3, 4), Segment(1, 1, 5, 6)]
    metadata = dataclasses.replace(AttentionMetadata.build(segments, CPU), shared=(shared,))
    rows = [torch.zeros(1, 2, 16)] * 3
    with pytest.raises(ValueError, match="shared range"):
        HostAttention(some_layers()).forward(0, *rows, AttentionOptions(), metadata)


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_tensors_of_other_shapes_or_dtypes_are_refused(wrong: int) -> None:
    metadata = AttentionMetadata.build([Segment(0, 0, 3, 4)], CPU)
    backend = HostAttention(some_layers())
    for bad in (
        torch.zeros(1, 2, 16),
        torch.zeros(1, 1, 32),
        torch.zeros(1, 1, 16).double(),
        torch.zeros(1, 1, 16, device="meta"),
    ):
        rows = [torch.zeros(1, 1, 16)] * 3
        rows[wrong] = bad
        with pytest.raises(ValueError, match="expected"):
            backend.forward(0, *rows, AttentionOptions(), metadata)


@pytest.mark.parametrize("sinks", [torch.zeros(1), torch.zeros(2, 1), torch.zeros(2).to("meta")])
def test_sinks_of_another_number_of_heads_are_refused(sinks: torch.Tensor) -> None:
    rows = [torch.zeros(heads, 1, 16) for heads in (2, 1, 1)]
    metadata = AttentionMetadata.build([Segment(0, 0, 3, 4)], CPU)
    with pytest.raises(ValueError, match="sinks are"):
        HostAttention(some_layers()).forward(0, *rows, AttentionOptions(sinks=sinks), metadata)


@pytest.mark.parametrize("scaling", [0.0, -1.0, float("nan")])
def test_a_scaling_that_is_not_positive_is_refused(scaling: float) -> None:
    rows = [torch.zeros(1, 1, 16)] * 3
    metadata = AttentionMetadata.build([Segment(0, 0, 3, 4)], CPU)
    with pytest.raises(ValueError, match="scaling must be positive"):
        HostAttention(some_layers()).forward(0, *rows, AttentionOptions(scaling), metadata)


def test_a_model_whose_head_size_no_kernel_takes_is_served_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{**CONFIGS["llama"]().to_dict(), "head_dim": 24, "num_hidden_layers": 2}
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    prompt = random_prompts((20,))[0]
    expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=8)
    with (
        caplog.at_level(logging.WARNING, "flexinfer"),
        LLM(str(tmp_path), skip_tokenizer_init=True, kv_cache_memory_bytes="4MiB") as llm,
    ):
        output = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert output[0].outputs[0].token_ids == expected[0, len(prompt) :].tolist()
    told = [r.getMessage() for r in caplog.records if r.name.startswith("flexinfer")]
    assert [message for message in told if "head size 24" in message] == told
    assert len(told) == 1
