"""Quantised KV: what stands in a row, and what it stands for."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from flexinfer.attention.base import AttentionMetadata, AttentionOptions, LayerKV
from flexinfer.attention.host import HostAttention
from flexinfer.attention.kv_format import KVFormat
from flexinfer.attention.sdpa import SdpaAttention
from flexinfer.attention.segments import Segment
from flexinfer.runtime.kernels import available_isas

FORMATS = ["int8", "fp8_e4m3"]


def store(numbers: torch.Tensor, name: str, isa: str) -> torch.Tensor:
    """The bytes that the host kernel makes of [tokens, heads, head_dim], as K and as V of one
    request."""
    num_tokens, num_heads, head_dim = numbers.shape
    arena = torch.full((2, 1, num_tokens, num_heads, head_dim + 4), 255, dtype=torch.uint8)
    backend = HostAttention([LayerKV(*arena, format=KVFormat(name, numbers.dtype))], isa)
    rows = numbers.transpose(0, 1)
    metadata = AttentionMetadata.build([Segment(0, 0, 0, num_tokens)], torch.device("cpu"))
    backend.forward(0, rows, rows, rows, AttentionOptions(), metadata)
    return arena[:, 0]


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernels_store_the_bytes_of_the_definition(
    isa: str, name: str, dtype: torch.dtype
) -> None:
    """Halves between two bytes too, of which bfloat16 has many; zeros; numbers far apart."""
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randn(400, 3, 48, generator=generator)
    numbers *= torch.logspace(-7, 3, 400)[:, None, None]
    numbers[7], numbers[9, 1, 5:] = 0, 0
    numbers[20:60] *= torch.logspace(-6, 0, 48)
    numbers = numbers.to(dtype)
    stored = KVFormat(name, dtype)
    keys, values = store(numbers, name, isa)
    assert torch.equal(keys, stored.quantise_keys(numbers))
    assert torch.equal(values, stored.quantise(numbers))


@pytest.mark.parametrize("isa", ["reference", *available_isas()])
@pytest.mark.parametrize("name", FORMATS)
def test_a_number_is_half_a_step_away_at_most_and_a_head_that_is_not_finite_stays_so(
    isa: str, name: str
) -> None:
    stored = KVFormat(name, torch.float32)
    numbers = torch.randn(30, 2, 32, generator=torch.Generator().manual_seed(1))
    numbers[3, 0, 4], numbers[5, 1, 31], numbers[6, 0, 0] = torch.inf, torch.nan, -torch.inf
    odd = torch.zeros(30, 2, dtype=torch.bool)
    odd[3, 0], odd[5, 1], odd[6, 0] = True, True, True
    rows = stored.quantise(numbers) if isa == "reference" else store(numbers, name, isa)[1]
    found = stored.dequantise(rows)
    assert found[odd].isnan().all()
    largest = numbers[~odd].abs().amax(-1, keepdim=True)
    step = largest / 127 if name == "int8" else (numbers[~odd].abs() / 8).clamp(largest / 448 / 512)
    assert ((found[~odd] - numbers[~odd]).abs() <= 0.501 * step).all()


def test_head_sizes_that_no_vector_fits_go_by_sdpa(caplog: pytest.LogCaptureFixture) -> None:
    from flexinfer import attention

    arena = torch.zeros(2, 1, 8, 1, 40 + 4, dtype=torch.uint8)
    layer = LayerKV(*arena, format=KVFormat("int8", torch.float32))
    backend = attention.create("auto", [layer])
    assert type(backend).__name__ == "SdpaAttention"
    assert "head size 40 is not a multiple of 16" in caplog.text


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (128, 128), (256, 64), (192, 80)])
@pytest.mark.parametrize("group", [1, 2, 3, 7])
def test_decodes_over_int8_lose_no_more_than_their_own_rounding(
    isa: str, dtype: torch.dtype, key_dim: int, value_dim: int, group: int
) -> None:
    """A query with a number far above its others, which 8 bits would round away; a value of one key
    that is much heavier than all others; a window; a soft cap."""
    generator = torch.Generator().manual_seed(group)
    stored = KVFormat("int8", dtype)
    starts = (0, 5, 31, 150, 700)
    widths = (key_dim, value_dim)
    numbers = [torch.randn(len(starts), 720, 2, width, generator=generator) for width in widths]
    arena = stored.quantise_keys(numbers[0]), stored.quantise(numbers[1])
    query = torch.randn(2 * group, len(starts), key_dim, generator=generator)
    query[:, :, 3] *= 30
    rows = [torch.randn(2, len(starts), width, generator=generator) for width in widths]
    segments = [Segment(i, i, start, start + 1) for i, start in enumerate(starts)]
    metadata = AttentionMetadata.build(segments, torch.device("cpu"))
    inputs = [part.to(dtype) for part in (query, *rows)]
    for options in (AttentionOptions(), AttentionOptions(0.2, 100, 5.0)):
        wide = [LayerKV(*(a.clone() for a in arena), format=KVFormat("int8", torch.float32))]
        expected = SdpaAttention(wide).forward(
            0, *(part.float() for part in inputs), options, metadata
        )
        layers = [LayerKV(*(a.clone() for a in arena), format=stored)]
        output = HostAttention(layers, isa).forward(0, *inputs, options, metadata)
        bound = 6e-3 if dtype == torch.bfloat16 else 2e-3
        torch.testing.assert_close(output.float(), expected, atol=bound, rtol=bound)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("part", [0, 1])
def test_a_key_or_value_that_is_not_finite_shows_in_its_request_alone(isa: str, part: int) -> None:
    stored = KVFormat("int8", torch.bfloat16)
    numbers = torch.randn(2, 2, 50, 1, 64, generator=torch.Generator().manual_seed(0))
    numbers[part, 1, 17, 0, 5] = torch.inf
    arena = stored.quantise_keys(numbers[0]), stored.quantise(numbers[1])
    segments = [Segment(i, i, 40, 41) for i in range(2)]
    metadata = AttentionMetadata.build(segments, torch.device("cpu"))
    rows = torch.ones(1, 2, 64, dtype=torch.bfloat16)
    layer = LayerKV(*arena, format=stored)
    output = HostAttention([layer], isa).forward(0, rows, rows, rows, AttentionOptions(), metadata)
    assert output[0].isfinite().all()
    assert not output[1].isfinite().any()
