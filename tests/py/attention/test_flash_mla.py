"""Decodes over latents by FlashMLA, of which helpers/flash_mla_reference.py is a stand-in."""

from __future__ import annotations

import logging
import sys
from functools import wraps
from typing import Any

import pytest

torch = pytest.importorskip("torch")
tf = pytest.importorskip("transformers")

from flexinfer import LLM, SamplingParams, attention
from flexinfer.attention import select
from flexinfer.attention.base import AttentionMetadata, AttentionOptions, LayerKV
from flexinfer.attention.flash_mla import FlashMla, FlashMlaAttention, unsupported
from flexinfer.attention.sdpa import ExactAttention, SdpaAttention
from flexinfer.attention.segments import Segment
from helpers.flash_mla_reference import FlashMlaPackage
from helpers.tiny_models import continue_prompt, draw_model, random_prompts

torch.set_num_threads(1)

EXACT = (torch.float32,)
HOPPER = (9, 0)
NUM_HEADS = 3


def make_layers(
    num_slots: int = 6, rows_per_slot: int = 300, dtype: torch.dtype = torch.float32
) -> list[LayerKV]:
    """Two interleaved layers; rows that nobody has written are NaN, as if they had no memory."""
    arena = torch.full((num_slots, rows_per_slot, 2, 1, 576), torch.nan, dtype=dtype)
    return [LayerKV(arena[:, :, i], arena[:, :, i, :, :512]) for i in range(2)]


def run_step(
    layers: list[LayerKV],
    package: FlashMlaPackage,
    lengths: list[tuple[int, int]],
    options: AttentionOptions,
    slots: list[int],
) -> None:
    """lengths: (tokens with KV, new tokens) of each request, decodes first."""
    generator = torch.Generator().manual_seed(len(lengths))
    segments, row = [], 0
    for slot, (start, num_new) in zip(slots, lengths, strict=True):
        for layer in layers:
            layer.k[slot, :start] = torch.randn(start, 1, 576, generator=generator)
        segments.append(Segment(slot, row, start, start + num_new))
        row += num_new
    metadata = AttentionMetadata.build(segments, torch.device("cpu"))
    copies = [layer.k.clone() for layer in layers]
    others = ExactAttention([LayerKV(copy, copy[..., :512]) for copy in copies])
    backend = FlashMlaAttention(layers, FlashMla(package))
    for layer_idx in range(len(layers)):
        query = torch.randn(NUM_HEADS, row, 576, generator=generator)
        key = torch.randn(1, row, 576, generator=generator)
        step = (query, key, key[..., :512], options, metadata)
        output = backend.forward(layer_idx, *step)
        expected = others.forward(layer_idx, *step)
        torch.testing.assert_close(output, expected, atol=2e-5, rtol=1e-4)
        assert torch.equal(
            torch.nan_to_num(layers[layer_idx].k), torch.nan_to_num(copies[layer_idx])
        )


@pytest.mark.parametrize(
    ("rows_per_slot", "slots"),
    [(300, [4, 0, 2, 5, 1, 3]), (320, [0, 1, 2, 3, 4, 5]), (257, [5, 4, 3, 2, 1, 0])],
)
@pytest.mark.parametrize("scaling", [None, 0.1])
def test_decodes_of_any_length_beside_prefills(
    rows_per_slot: int, slots: list[int], scaling: float | None
) -> None:
    """Slots of no whole pages as well: pages of the list then overlap."""
    lengths = [(0, 1), (63, 1), (64, 1), (200, 1), (0, 5), (70, 30)]
    package = FlashMlaPackage(EXACT)
    run_step(make_layers(6, rows_per_slot), package, lengths, AttentionOptions(scaling), slots)
    assert (package.num_calls, package.num_plans) == (2, 1), "one call a layer, by one plan"


def test_decodes_within_their_first_page_ask_nothing_of_the_kernel() -> None:
    package = FlashMlaPackage(EXACT)
    run_step(make_layers(), package, [(0, 1), (63, 1)], AttentionOptions(), [3, 1])
    assert package.num_calls == package.num_plans == 0


@pytest.mark.parametrize(
    "options",
    [
        AttentionOptions(sliding_window=20),
        AttentionOptions(softcap=5.0),
        AttentionOptions(sinks=torch.zeros(NUM_HEADS)),
        AttentionOptions(chunk=128),
    ],
)
def test_layers_that_ask_for_more_go_through_sdpa(options: AttentionOptions) -> None:
    package = FlashMlaPackage(EXACT)
    run_step(make_layers(), package, [(100, 1)], options, [2])
    assert package.num_calls == 0


def test_an_engine_says_what_transformers_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Latents as wide as DeepSeek-V3's, in a model that is tiny otherwise."""
    config = tf.DeepseekV3Config(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=512,
        qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=16, first_k_dense_replace=2,
        max_position_embeddings=256, initializer_range=0.3, bos_token_id=None, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    model = draw_model(config)
    package = FlashMlaPackage(EXACT)
    monkeypatch.setattr(
        attention, "create", lambda name, layers: FlashMlaAttention(layers, FlashMla(package))
    )
    prompts = random_prompts((130, 1, 60, 75))
    params = SamplingParams(temperature=0, max_tokens=8)
    with LLM(
        model,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=32 << 20,
        chunk_bytes=4096,
        max_model_len=200,
        max_num_batched_tokens=64,
    ) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    answers = [continue_prompt(model, tuple(prompt), 8) for prompt in prompts]
    assert [output.outputs[0].token_ids for output in outputs] == answers
    assert package.num_calls > 2 * 8


def half_layers() -> list[LayerKV]:
    return make_layers(dtype=torch.bfloat16)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())


@pytest.mark.usefixtures("hopper")
def test_it_is_taken_where_it_is_installed_and_right(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "flash_mla", FlashMlaPackage())
    with caplog.at_level(logging.INFO):
        backend = select.choose_cuda("auto", half_layers())
    assert isinstance(backend, FlashMlaAttention)
    assert backend.name == "decode: FlashMLA 1.0.0, prefill: torch's SDPA"
    assert [record.levelname for record in caplog.records] == ["INFO"]


class Older(FlashMlaPackage):
    @wraps(FlashMlaPackage.flash_mla_with_kvcache)
    def flash_mla_with_kvcache(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no kernel image is available\nhint")


class OtherBase(FlashMlaPackage):
    @wraps(FlashMlaPackage.flash_mla_with_kvcache)
    def flash_mla_with_kvcache(self, *args: Any, **kwargs: Any) -> Any:
        output, lse = FlashMlaPackage.flash_mla_with_kvcache(self, *args, **kwargs)
        return output, lse / 0.6931  # log-sum-exps of base 2 would merge wrongly


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("name", "package", "reason"),
    [
        ("auto", None, "flash_mla is not installed"),
        ("flash", Older(), "FlashMLA 1.0.0 does not work here: no kernel image is available"),
        ("auto", OtherBase(), "FlashMLA 1.0.0 gives wrong results here (off by "),
        ("sdpa", FlashMlaPackage(), "SDPA is asked for"),
    ],
)
def test_what_is_taken_instead_is_told_with_the_reason(
    name: str,
    package: FlashMlaPackage | None,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if package is not None:
        monkeypatch.setitem(sys.modules, "flash_mla", package)
    backend = select.choose_cuda(name, half_layers())
    assert type(backend) is SdpaAttention
    assert f"flash kernels know no latents (MLA); {reason}" in caplog.text


def latents(width: int = 576, value_width: int = 512, **shape: Any) -> LayerKV:
    arena = torch.zeros(2, 64, 1, width, dtype=shape.get("dtype", torch.bfloat16))
    return LayerKV(arena, arena[..., :value_width])


def odd_rows(tokens_between: int) -> LayerKV:
    arena = torch.zeros(2 * 64 * 576 + 600, dtype=torch.bfloat16)
    arena = arena.as_strided((2, 64, 1, 576), (64 * 576 + tokens_between, 576, 576, 1))
    return LayerKV(arena, arena[..., :512])


@pytest.mark.parametrize(
    ("layers", "capability", "reason"),
    [
        ([latents()], (10, 0), r"decodes on Hopper .*, not on \(10, 0\)"),
        ([latents(), LayerKV(torch.zeros(1), torch.zeros(1))], HOPPER, "others beside them"),
        ([latents(), latents(640)], HOPPER, "one shape and stride"),
        ([latents(288, 256)], HOPPER, r"not of \(288, 256\)"),
        ([latents(dtype=torch.float32)], HOPPER, "not float32"),
        ([odd_rows(4)], HOPPER, "multiples of 16 bytes"),
        ([odd_rows(8)], HOPPER, "whole numbers of token strides"),
        ([latents(), latents()], HOPPER, None),
    ],
)
def test_layers_that_it_cannot_read_are_told(
    layers: list[LayerKV], capability: tuple[int, int], reason: str | None
) -> None:
    found = unsupported(layers, capability)
    if reason is None:
        assert found is None
    else:
        with pytest.raises(ValueError, match=reason):
            raise ValueError(found)
