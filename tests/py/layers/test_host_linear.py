"""Panel layers equal torch's own, for every instruction set, dtype and shape."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from flexinfer.layers import host_linear
from flexinfer.layers import rows as row_ops
from flexinfer.layers.host_linear import HostLinear, in_panels, multiply_panels
from flexinfer.runtime.kernels import DTYPES, available_isas
from helpers.each_isa import each_isa

EXAMPLES = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


isa = each_isa(host_linear, available_isas())


def multiply(x: Any, weight: Any, bias: Any, residual: Any, output: Any) -> None:
    panels = in_panels(weight)
    multiply_panels(x, panels.data_ptr(), weight.shape[1], bias, residual, output)


@EXAMPLES
@given(
    rows=st.one_of(st.integers(0, 50), st.sampled_from([64, 65, 96, 239, 241, 500, 900])),
    depth=st.sampled_from([32, 96, 512, 544, 1408]),
    columns=st.sampled_from([16, 32, 48, 400]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    has_bias=st.booleans(),
    has_residual=st.booleans(),
    is_slice=st.booleans(),
)
def test_host_linear(
    isa: str,
    rows: int,
    depth: int,
    columns: int,
    dtype: torch.dtype,
    has_bias: bool,
    has_residual: bool,
    is_slice: bool,
) -> None:
    torch.manual_seed(rows)
    weight = (torch.randn(columns, depth) / depth**0.5).to(dtype)
    bias = torch.randn(columns).to(dtype) if has_bias else None
    residual = torch.randn(1, rows, columns).to(dtype) if has_residual else None
    x = torch.randn(1, rows, depth + 16 * is_slice).to(dtype)[..., :depth]
    output = torch.empty(1, rows, columns, dtype=dtype)
    multiply(x, weight, bias, residual, output)
    expected = x.double() @ weight.double().T
    for added in (bias, residual):
        expected = expected if added is None else expected + added.double()
    eps = torch.finfo(dtype).eps
    bound = 4e-6 * max(1.0, depth / 512) if dtype == torch.float32 else eps
    torch.testing.assert_close(output.double(), expected, atol=bound, rtol=bound)


def test_many_rows_of_float32_lose_no_bit_whatever_the_magnitudes(isa: str) -> None:
    """One product a sum: a part of a number that is left out would show at once."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        exponents = torch.randint(-40, 41, shape, generator=generator)
        return torch.ldexp(1 + torch.rand(shape, generator=generator), exponents)

    depth, columns = 64, 80
    weight = numbers(columns, depth)
    x = torch.eye(depth).repeat(3, 1) * numbers(3 * depth, 1)
    output = torch.empty(3 * depth, columns)
    multiply(x, weight, None, None, output)
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(output.double(), expected, atol=0, rtol=2**-22)


@pytest.mark.parametrize("depth", [512, 1408, 4096])
def test_errors_of_float32_are_those_of_sums_of_blocks(isa: str, depth: int) -> None:
    """Numbers of variance 1, so that a sum of k products is sqrt(k) on the average. An addition is
    wrong by at most eps / 2 of its result, evenly spread: by eps^2 k / 12 in the mean square."""
    torch.manual_seed(0)
    block = 256
    x, weight = torch.randn(200, depth), torch.randn(128, depth)
    output = torch.empty(200, 128)
    multiply(x, weight, None, None, output)
    error = (output - x.double() @ weight.double().T).square().mean()
    in_blocks, of_blocks = depth * block / 2, depth * depth / block / 2
    assert error < torch.finfo(torch.float32).eps ** 2 / 12 * (in_blocks + of_blocks)


@EXAMPLES
@given(
    rows=st.one_of(st.integers(49, 130), st.sampled_from([255, 257, 500, 900])),
    depth=st.sampled_from([32, 96, 512, 1408, 2816]),
    num_panels=st.sampled_from([2, 4, 22]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    has_bias=st.booleans(),
    is_slice=st.booleans(),
)
def test_gates_are_the_same_bits_as_in_two_passes(
    isa: str,
    rows: int,
    depth: int,
    num_panels: int,
    dtype: torch.dtype,
    has_bias: bool,
    is_slice: bool,
) -> None:
    assume(host_linear.kernel().has_gates(DTYPES[dtype], depth))
    torch.manual_seed(rows)
    columns = num_panels * host_linear.panel_columns(dtype)
    weight = (torch.randn(columns, depth) / depth**0.5).to(dtype)
    bias = torch.randn(columns).to(dtype) if has_bias else None
    x = torch.randn(rows, depth + 16 * is_slice).to(dtype)[:, :depth]
    plain, gated = (torch.empty(rows, n, dtype=x.dtype) for n in (columns, columns // 2))
    panels = in_panels(weight)
    multiply_panels(x, panels.data_ptr(), depth, bias, None, plain)
    multiply_panels(x, panels.data_ptr(), depth, bias, None, gated, gates=True)
    expected = row_ops.silu_mul(*plain.chunk(2, dim=-1))
    # The other pass may be that of another instruction set, with other last bits in float32.
    bound = 1e-6 if dtype == torch.float32 else 0
    torch.testing.assert_close(gated, expected, atol=bound, rtol=bound)


@EXAMPLES
@given(
    rows=st.integers(2, 700),
    cut=st.floats(0, 1),
    depth=st.sampled_from([32, 96, 512, 1408]),
    columns=st.sampled_from([64, 704]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_row_is_the_same_bits_among_whatever_rows(
    isa: str, rows: int, cut: float, depth: int, columns: int, dtype: torch.dtype
) -> None:
    """Not in float32 on AMX, where few rows are not split."""
    assume(host_linear.kernel().has_gates(DTYPES[dtype], depth))
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, depth).to(dtype), torch.randn(columns, depth).to(dtype)
    at_once, in_two = (torch.empty(rows, columns, dtype=x.dtype) for _ in range(2))
    first = 1 + int(cut * (rows - 2))
    multiply(x, weight, None, None, at_once)
    multiply(x[:first], weight, None, None, in_two[:first])
    multiply(x[first:], weight, None, None, in_two[first:])
    assert torch.equal(at_once, in_two)


@pytest.mark.parametrize("special", [float("inf"), -float("inf"), float("nan")])
def test_special_numbers_of_bfloat16_reach_the_outputs_of_their_row_alone(
    isa: str, special: float
) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(70, 96).bfloat16(), torch.randn(48, 96).bfloat16()
    x[67, 33] = special
    output = torch.empty(70, 48, dtype=x.dtype)
    multiply(x, weight, None, None, output)
    torch.testing.assert_close(output, x @ weight.T, equal_nan=True, atol=0.1, rtol=0.01)
    assert output.isfinite().all(dim=1).sum() == 69


@pytest.mark.parametrize("columns", [1, 15, 17, 60, 331])
@pytest.mark.parametrize("rows", [1, 5, 49, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_of_any_number_of_outputs(isa: str, columns: int, rows: int, dtype: Any) -> None:
    torch.manual_seed(columns)
    weight, bias = torch.randn(columns, 96).to(dtype), torch.randn(columns).to(dtype)
    x, residual = torch.randn(2, rows, 96).to(dtype), torch.randn(2, rows, columns).to(dtype)
    tolerance = 2e-5 if dtype == torch.float32 else 0.05
    for given_bias in (None, bias):
        layer = HostLinear(weight, given_bias)
        expected = torch.nn.functional.linear(x.double(), weight.double())
        expected += 0 if given_bias is None else given_bias.double()
        for added in (None, residual):
            output = layer(x, added)
            whole = expected if added is None else expected + added.double()
            torch.testing.assert_close(output, whole.to(dtype), atol=tolerance, rtol=tolerance)
            assert output.is_contiguous()


def test_an_odd_depth_in_float32(isa: str) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(64, 37), torch.randn(9, 37)
    output = torch.empty(9, 64)
    multiply(x, weight, None, None, output)
    torch.testing.assert_close(output, x @ weight.T)


def z(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


@pytest.mark.parametrize(
    "weight",
    [
        z(32, 16, dtype=torch.bfloat16),
        z(32, 32, dtype=torch.float16),
        z(32, 32, device="meta"),
        z(32),
        z(32, 0),
        z(0, 32),
    ],
)
def test_weights_that_the_kernel_does_not_take_are_told(weight: torch.Tensor) -> None:
    assert not host_linear.supports(weight)


@pytest.mark.parametrize(
    ("x", "residual"),
    [
        (z(2, 16), None),
        (z(3, 32), None),
        (z(2, 32, dtype=torch.bfloat16), None),
        (z(2, 32, device="meta"), None),
        (z(2, 32), z(1, 64)),
        (z(2, 32), z(2, 64, dtype=torch.bfloat16)),
        (z(2, 32), z(2, 64, device="meta")),
    ],
)
def test_inputs_that_do_not_fit_are_refused(x: torch.Tensor, residual: Any) -> None:
    with pytest.raises(ValueError, match=r"a layer of 32 inputs and 64|the residual must be"):
        multiply(x, z(64, 32), None, residual, z(2, 64))


@pytest.mark.parametrize(
    ("rows", "dtype", "columns", "has_residual"),
    [
        (48, torch.float32, 128, False),
        (64, torch.bfloat16, 96, False),
        (64, torch.bfloat16, 128, True),
        (48, torch.bfloat16, 128, False),
    ],
)
def test_gates_that_the_kernel_does_not_take_are_refused(
    rows: int, dtype: torch.dtype, columns: int, has_residual: bool
) -> None:
    x, output = z(rows, 32, dtype=dtype), z(rows, columns // 2, dtype=dtype)
    residual = output if has_residual else None
    with pytest.raises(ValueError, match="gates take no residual"):
        multiply_panels(x, 0, 32, None, residual, output, gates=True)


def test_gates_of_float32_are_refused_where_their_products_are_split(isa: str) -> None:
    if host_linear.kernel().has_gates(DTYPES[torch.float32], 32):
        pytest.skip("it has them")
    with pytest.raises(ValueError, match=f"on {isa}"):
        multiply_panels(z(64, 32), 0, 32, None, None, z(64, 64), gates=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 32), (128, 512), (512, 1408), (320, 96)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_layers(isa: str, dtype: torch.dtype, shape: tuple[int, int], has_bias: bool) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(shape[1], shape[0], bias=has_bias, dtype=dtype)
    layer = HostLinear(linear.weight, linear.bias)
    bounds = {"atol": 0.04, "rtol": 0.02} if dtype == torch.bfloat16 else {}
    for rows in (0, 1, 5, 32, 48, 49, 64, 65, 100):
        x, residual = torch.randn(rows, shape[1]).to(dtype), torch.randn(rows, shape[0]).to(dtype)
        with torch.inference_mode():
            torch.testing.assert_close(layer(x), linear(x))
            torch.testing.assert_close(layer(x, residual), residual + linear(x), **bounds)
