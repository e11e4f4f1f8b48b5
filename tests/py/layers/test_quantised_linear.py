"""Layers with quantised weights equal a slow product of the same integers, at every level."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexinfer import _kernels
from flexinfer.layers import quantised_linear
from flexinfer.layers.codebook import Codebook
from flexinfer.layers.linear import silu_gates
from flexinfer.layers.quantised import QuantisedTensor, Scheme, quantise_inputs, quantise_outputs
from flexinfer.layers.quantised_linear import QuantisedLinear
from helpers.each_isa import each_isa
from helpers.stored_weights import STORED, assert_same_rows, quantise

EXAMPLES = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SCHEMES = ("int8", "int4", "int4-g64", "int4-g128-zp", "int4-a8", "int4-g64-zp-a8")


isa = each_isa(quantised_linear, _kernels.available_quantised_isas())


@EXAMPLES
@given(
    rows=st.one_of(st.integers(0, 14), st.sampled_from([29, 240, 241, 500])),
    depth=st.sampled_from([128, 384, 1024]),
    columns=st.sampled_from([16, 64, 80, 100, 200]),
    scheme=st.sampled_from((*SCHEMES, *STORED)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    has_bias=st.booleans(),
    has_residual=st.booleans(),
    is_slice=st.booleans(),
)
def test_it_is_the_product_with_the_same_integers(
    isa: str,
    rows: int,
    depth: int,
    columns: int,
    scheme: str,
    dtype: torch.dtype,
    has_bias: bool,
    has_residual: bool,
    is_slice: bool,
) -> None:
    torch.manual_seed(rows)
    weight = torch.randn(columns, depth) / depth**0.5
    source = quantise(scheme, weight)
    bias = torch.randn(columns).to(dtype) if has_bias else None
    residual = torch.randn(1, rows, columns).to(dtype) if has_residual else None
    x = torch.randn(1, rows, depth + 16 * is_slice).to(dtype)[..., :depth]
    output = QuantisedLinear(source, bias, dtype)(x, residual)
    expected = source.reference(x)
    for added in (bias, residual):
        expected = expected if added is None else expected + added.double()
    bound = 5e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(output.double(), expected, atol=bound, rtol=bound)


@EXAMPLES
@given(
    rows=st.one_of(st.integers(0, 14), st.sampled_from([29, 240, 241, 500])),
    columns=st.sampled_from([128, 384, 1024]),
    scheme=st.sampled_from((*SCHEMES, *STORED)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    has_bias=st.booleans(),
    is_slice=st.booleans(),
)
def test_gates_are_the_same_bits_as_in_two_passes(
    isa: str,
    rows: int,
    columns: int,
    scheme: str,
    dtype: torch.dtype,
    has_bias: bool,
    is_slice: bool,
) -> None:
    torch.manual_seed(rows)
    source = quantise(scheme, torch.randn(columns, 256) / 16)
    bias = torch.randn(columns).to(dtype) if has_bias else None
    x = torch.randn(1, rows, 256 + 16 * is_slice).to(dtype)[..., :256]
    layer = QuantisedLinear(source, bias, dtype)
    expected = silu_gates(layer.multiply(x, None))
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(QuantisedLinear, "multiply")  # gates and factors are not held at once
        gated = layer.multiply_gates(x)
    # The other pass may be that of another instruction set, with other last bits in float32.
    bound = 1e-6 if dtype == torch.float32 else 0
    torch.testing.assert_close(gated, expected, atol=bound, rtol=bound)


@pytest.mark.parametrize("columns", [96, 192, 320])
def test_gates_that_share_a_panel_with_factors_come_in_two_passes(columns: int) -> None:
    torch.manual_seed(columns)
    source = Scheme.parse("int8").quantise(torch.randn(columns, 256) / 16)
    layer = QuantisedLinear(source, None, torch.float32)
    x = torch.randn(300, 256)
    assert torch.equal(layer(x, gates=True), silu_gates(layer(x)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", [*SCHEMES, *STORED])
@pytest.mark.parametrize("first", [1, 5, 12, 31])
def test_a_row_is_the_same_bits_among_whatever_rows(
    isa: str, first: int, scheme: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(first)
    source = quantise(scheme, torch.randn(80, 256))
    layer = QuantisedLinear(source, None, dtype)
    x = torch.randn(263, 256).to(dtype)
    torch.set_num_threads(1)
    in_two = torch.cat([layer(x[:first]), layer(x[first:])])
    torch.set_num_threads(2)
    assert torch.equal(layer(x), in_two)


@pytest.mark.parametrize("columns", [1, 64, 331])
@pytest.mark.parametrize("scheme", [*SCHEMES, *STORED])
def test_rows_come_back_as_they_were(columns: int, scheme: str) -> None:
    torch.manual_seed(columns)
    source = quantise(scheme, torch.randn(columns, 256))
    layer = QuantisedLinear(source, None, torch.float32)
    assert_same_rows(layer, source)


def test_integers_are_added_exactly_at_the_ends_of_their_range(isa: str) -> None:
    """Sums of 16 bits would saturate."""
    signs = torch.tensor([1.0, -1.0])
    weight = signs.repeat(128)[None] * torch.ones(32, 1)
    x = torch.stack([weight[0], -weight[0], torch.ones(256)])
    source = quantise_outputs(weight)
    output = QuantisedLinear(source, None, torch.float32)(x)
    expected = torch.tensor([256.0, -256.0, 0.0])[:, None].expand(3, 32)
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("group", [16, 32, 256])
def test_integers_of_groups_are_added_exactly_at_the_ends_of_their_range(
    isa: str, group: int, bits: int
) -> None:
    """Of weights in groups that are -128 and 127, as files may have them."""
    most = 1 << bits - 1
    integers = torch.full((32, 256), -most, dtype=torch.int8)
    integers[:, 1::2] = most - 1
    integers[16:] = most - 1
    scales = torch.ones(32, 256 // group)
    source = QuantisedTensor(integers, scales, None, bits, group, byte_inputs=True)
    x = torch.tensor([-127.0, 127.0]).repeat(128)
    x = torch.stack([x, -x, x.abs(), -x.abs()])
    output = QuantisedLinear(source, None, torch.float32)(x)
    assert torch.equal(output.double(), source.reference(x))


def test_inputs_become_the_integers_that_the_definition_says(isa: str) -> None:
    """Half of the largest is the middle of two integers, give or take the factor's rounding."""
    torch.manual_seed(0)
    largest = (1 + torch.rand(300, 1)).bfloat16().float()
    x = torch.cat([largest, largest / 2, -largest / 2, torch.randn(300, 61).clamp(-1, 1)], dim=1)
    layer = QuantisedLinear(quantise_outputs(torch.eye(64)), None, torch.float32)
    integers, scales = quantise_inputs(x)
    assert torch.equal((layer(x) / scales).round(), integers)


@pytest.mark.parametrize("depth", [576, 2048])
@pytest.mark.parametrize("scheme", ["int8", "int4-a8"])
def test_a_few_large_inputs_leave_bits_to_the_others(isa: str, scheme: str, depth: int) -> None:
    """Trained models have such inputs; unless they are rotated, all others round to nothing."""
    torch.manual_seed(0)
    x = torch.randn(40, depth)
    x[:, 7] *= 300
    weight = torch.randn(64, depth)
    weight[:, 7] = 0
    source = Scheme.parse(scheme).quantise(weight)
    errors = []
    for made in (source, quantise_outputs(weight)):
        output = QuantisedLinear(made, None, torch.float32)(x)
        errors.append((output - x @ made.dequantised().T).norm())
    assert 4 * errors[0] < errors[1]


@dataclass(frozen=True)
class Spread:
    """A codebook that there is not."""

    numbers: tuple[int, ...]
    factor_unit = 1.0
    look_up = Codebook.look_up


SPREADS = [Spread((least, most, *range(14))) for least, most in ((-64, 65), (-65, 65), (-128, 127))]
"""Numbers as far apart as fit the products of bytes that are fastest, one further, and all."""


@pytest.mark.parametrize("codebook", [*Codebook, *SPREADS], ids=str)
@pytest.mark.parametrize("byte_inputs", [False, True])
@pytest.mark.parametrize("group", [16, 32, 1024])
def test_each_number_of_a_codebook_is_multiplied_exactly(
    isa: str, group: int, byte_inputs: bool, codebook: Any
) -> None:
    """At every place of a step, beside all others, and with the largest inputs: sums of 16 bits
    would saturate."""
    torch.manual_seed(group)
    integers = torch.randint(-8, 8, (96, group)).to(torch.int8)
    table = torch.tensor(codebook.numbers)
    integers[:16] = torch.arange(-8, 8)[:, None]
    integers[16, :], integers[17, :] = table.argmax() - 8, table.argmin() - 8
    source = QuantisedTensor(
        integers, torch.ones(96, 1), None, 4, group, byte_inputs, codebook=codebook
    )
    x = torch.randint(1, 128, (9, group)).float() * torch.randn(9, group).sign()
    x[0], x[1], x[2, ::2] = 127, -127, -127
    x[:, 0] = 127
    for dtype in (torch.float32, torch.bfloat16):
        output = QuantisedLinear(source, None, dtype)(x.to(dtype))
        expected = x.double() @ table[integers.int() + 8].double().T
        assert torch.equal(output, expected.to(dtype))


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("group", [16, 512, 1024, 1536, 1552])
def test_inputs_of_bfloat16_are_multiplied_as_they_are(isa: str, bits: int, group: int) -> None:
    """Where none is less than a 128th of the largest one of its group: by words of 16 bits, too,
    at the ends of their range and in groups that are multiplied in pieces."""
    torch.manual_seed(group)
    most = 1 << bits - 1
    integers = torch.randint(-most, most, (80, group)).to(torch.int8)
    integers[:2, 1:], integers[2, 1:] = -most, most - 1
    scales, minimums = torch.ones(80, 1), torch.full((80, 1), 2.0)
    source = QuantisedTensor(integers, scales, minimums, bits, group)
    x = torch.randint(2, 256, (30, group)).float() * torch.randn(30, group).sign()
    x[0], x[1] = 255, -255
    output = QuantisedLinear(source, None, torch.bfloat16)(x.bfloat16())
    expected = source.reference(x).float().bfloat16()  # float32 has the sums, which are integers
    assert torch.equal(output, expected)


def test_small_inputs_beside_large_ones_lose_no_bit(isa: str) -> None:
    """Down to a 128th."""
    torch.manual_seed(0)
    integers = torch.eye(64).to(torch.int8)
    source = QuantisedTensor(integers, torch.ones(64, 2), None, 4, 32)
    x = (torch.randn(40, 64).sign() * 2 ** (8 * torch.rand(40, 64))).bfloat16()
    assert torch.equal(QuantisedLinear(source, None, torch.bfloat16)(x), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", ["int8", "int4", "int4-a8", *STORED])
def test_rows_that_are_not_numbers_spoil_themselves_alone(
    isa: str, scheme: str, dtype: torch.dtype
) -> None:
    x = torch.randn(4, 128).to(dtype)
    x[1, 5], x[2, 7], x[3] = torch.nan, torch.inf, 0
    source = quantise(scheme, torch.randn(64, 128))
    output = QuantisedLinear(source, None, dtype)(x)
    assert output[0].isfinite().all()
    assert not output[1].isfinite().any()
    assert not output[2].isfinite().any()
    assert not output[3].any()


@pytest.mark.parametrize(
    ("scheme", "dtype"), [("int8", torch.float32), ("int4", torch.bfloat16)], ids=str
)
def test_tiny_rows_are_zero_and_large_ones_are_not_infinite(
    isa: str, scheme: str, dtype: torch.dtype
) -> None:
    source = Scheme.parse(scheme).quantise(-torch.eye(64))
    x = torch.stack([torch.full((64,), 1e-44), torch.full((64,), 1e37)]).to(dtype)
    output = QuantisedLinear(source, None, dtype)(x)
    assert output[0].abs().max() < 1e-38
    torch.testing.assert_close(output[1], -x[1])


@pytest.mark.parametrize("columns", [64, 100])
def test_a_compiled_graph_calls_the_same_kernel(columns: int) -> None:
    torch.manual_seed(0)
    source = Scheme.parse("int4").quantise(torch.randn(columns, 64))
    layer = QuantisedLinear(source, torch.randn(columns), torch.float32)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x, residual = torch.randn(1, 5, 64), torch.randn(1, 5, columns)
    with torch.inference_mode():
        assert torch.equal(compiled(x, residual), layer(x, residual))
        if columns == 64:  # a gate's kernel takes widths that are multiples of 16
            assert torch.equal(compiled(x, gates=True), layer(x, gates=True))


def test_what_the_kernel_would_read_beyond_is_refused() -> None:
    source = Scheme.parse("int8").quantise(torch.randn(16, 64))
    layer = QuantisedLinear(source, None, torch.float32)
    for x in (torch.zeros(2, 60), torch.zeros(2, 64).bfloat16()):
        with pytest.raises(ValueError, match=r"64 inputs and 16 outputs of torch\.float32"):
            layer(x)
    with pytest.raises(ValueError, match="residual must be"):
        layer(torch.zeros(2, 64), torch.zeros(1, 16))
    with pytest.raises(ValueError, match=r"16 outputs got a bias of \[1\]"):
        QuantisedLinear(source, torch.ones(1), torch.float32)


@pytest.mark.parametrize(
    "name", ["int3", "int4-g16", "int4-g0", "int8-g32", "INT8", "int4-zp-g32", "int8-a8"]
)
def test_what_is_no_scheme_is_refused_with_the_choices(name: str) -> None:
    with pytest.raises(ValueError, match=r"auto, int8, or int4.*32, 64, 128.*or a8 for"):
        Scheme.parse(name)


@pytest.mark.parametrize(
    ("name", "bound"), [("int8", 0.011), ("int4", 0.11), ("int4-g32-zp", 0.1), ("int4-g128", 0.13)]
)
def test_weights_of_a_normal_distribution_lose_little(name: str, bound: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 512)
    error = Scheme.parse(name).quantise(weight).dequantised() - weight
    assert error.norm() / weight.norm() < bound


@pytest.mark.parametrize("name", ["int8", "int4", "int4-zp", "int4-a8"])
@pytest.mark.parametrize("number", [math.nan, math.inf, 1e6])
def test_numbers_that_scales_do_not_reach_are_refused(name: str, number: float) -> None:
    """With 4 bits their groups became zeros."""
    weight = torch.ones(16, 128)
    weight[3, 5] = number
    if name == "int8" and math.isfinite(number):
        largest = Scheme.parse(name).quantise(weight).dequantised().max()
        assert largest == pytest.approx(number, rel=0.01)
        return
    with pytest.raises(ValueError, match=r"cannot be quantised to [48] bits"):
        Scheme.parse(name).quantise(weight)


def test_groups_of_zeros_stay_zeros() -> None:
    for name in SCHEMES:
        assert not Scheme.parse(name).quantise(torch.zeros(16, 128)).dequantised().any()
