"""Row operations equal torch's own, for every instruction set, dtype and shape."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from flexinfer.layers import rows as row_ops
from flexinfer.runtime.kernels import available_isas
from helpers.each_isa import each_isa

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = st.sampled_from([0, 1, 3, 33, 200])
WIDTHS = st.sampled_from([16, 48, 512, 1040])
EXAMPLES = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


INFINITY = float("inf")

isa = each_isa(row_ops, available_isas())


def check(output: torch.Tensor, expected: torch.Tensor) -> None:
    assert output.shape == expected.shape
    assert output.dtype == expected.dtype
    eps = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(output, expected, atol=8 * eps, rtol=4 * eps)


@EXAMPLES
@given(rows=ROWS, width=WIDTHS, dtype=st.sampled_from(DTYPES), is_slice=st.booleans())
def test_rms_norm(isa: str, rows: int, width: int, dtype: torch.dtype, is_slice: bool) -> None:
    torch.manual_seed(rows)
    norm = LlamaRMSNorm(width, 1e-5).to(dtype)
    norm.weight.data.normal_()
    x = torch.randn(1, rows, width + 16 * is_slice).to(dtype)[..., :width]
    with torch.inference_mode():
        check(row_ops.rms_norm(x, norm.weight, 1e-5), norm(x))


@EXAMPLES
@given(rows=ROWS, width=WIDTHS, dtype=st.sampled_from(DTYPES), is_slice=st.booleans())
def test_rms_norm_with_a_wide_weight(
    isa: str, rows: int, width: int, dtype: torch.dtype, is_slice: bool
) -> None:
    """Rounded once: closer to what Gemma computes than a weight of fewer bits could be."""
    torch.manual_seed(rows)
    norm = Gemma3RMSNorm(width, 1e-5).to(dtype)
    norm.weight.data.normal_(std=0.1)
    x = torch.randn(1, rows, width + 16 * is_slice).to(dtype)[..., :width]
    with torch.inference_mode():
        output, expected = row_ops.rms_norm(x, 1.0 + norm.weight.float(), 1e-5), norm(x)
    assert output.dtype == expected.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(output, expected, atol=8e-7, rtol=max(eps, 4e-7))
    if dtype != torch.float32 and rows:
        assert (output == expected).float().mean() > 0.98


@EXAMPLES
@given(rows=ROWS, width=WIDTHS, dtype=st.sampled_from(DTYPES), scale=st.sampled_from([1, 30]))
def test_silu_mul(isa: str, rows: int, width: int, dtype: torch.dtype, scale: int) -> None:
    torch.manual_seed(rows)
    gate, factor = (scale * torch.randn(1, rows, width)).to(dtype), torch.randn(1, rows, width)
    factor = factor.to(dtype)
    expected = torch.nn.functional.silu(gate) * factor
    check(row_ops.silu_mul(gate, factor), expected)
    halves = torch.cat((gate, factor), dim=-1).chunk(2, dim=-1)
    check(row_ops.silu_mul(*halves), expected)


def test_silu_of_large_numbers(isa: str) -> None:
    gate = torch.tensor([-1e30, -200.0, -90.0, -80.0, 0.0, 80.0, 200.0, 1e30] * 2)[None]
    check(row_ops.silu_mul(gate, torch.ones(1, 16)), torch.nn.functional.silu(gate))


@EXAMPLES
@given(rows=ROWS, width=WIDTHS, dtype=st.sampled_from(DTYPES), scale=st.sampled_from([1, 5, 30]))
def test_gelu_tanh_mul(isa: str, rows: int, width: int, dtype: torch.dtype, scale: int) -> None:
    torch.manual_seed(rows)
    gate, factor = (scale * torch.randn(1, rows, width)).to(dtype), torch.randn(1, rows, width)
    factor = factor.to(dtype)
    expected = torch.nn.functional.gelu(gate, approximate="tanh") * factor
    check(row_ops.gelu_tanh_mul(gate, factor), expected)
    halves = torch.cat((gate, factor), dim=-1).chunk(2, dim=-1)
    check(row_ops.gelu_tanh_mul(*halves), expected)


def test_gelu_is_that_of_its_definition(isa: str) -> None:
    """In float64, of all numbers at which it bends."""
    x = torch.linspace(-12, 12, 16 * 20_000).view(-1, 16)
    inner = (2 / torch.pi) ** 0.5 * (x.double() + 0.044715 * x.double() ** 3)
    expected = x * torch.sigmoid(2 * inner)  # (1 + tanh(u)) / 2 is sigmoid(2 u)
    found = row_ops.gelu_tanh_mul(x, torch.ones_like(x)).double()
    torch.testing.assert_close(found, expected, atol=1e-30, rtol=1e-4)
    torch.testing.assert_close(found, expected, atol=6e-7, rtol=0)


EXTREMES = [-INFINITY, -3e38, -1e30, -1e13, -200.0, -11.0, -10.0, -9.0, -0.0, 0.0, 1e-40, 1e13]
EXTREMES += [1e30, 3e38, INFINITY, float("nan")]


def test_gelu_of_extreme_numbers(isa: str) -> None:
    """As torch has it, of minus infinity no number."""
    gate = torch.tensor([EXTREMES])
    expected = torch.nn.functional.gelu(gate, approximate="tanh")
    found = row_ops.gelu_tanh_mul(gate, torch.ones(1, 16))
    torch.testing.assert_close(found, expected, atol=1e-17, rtol=1e-6, equal_nan=True)


@EXAMPLES
@given(rows=ROWS, width=WIDTHS, dtype=st.sampled_from(DTYPES), is_slice=st.booleans())
def test_relu2(isa: str, rows: int, width: int, dtype: torch.dtype, is_slice: bool) -> None:
    torch.manual_seed(rows)
    x = torch.randn(1, rows, width + 16 * is_slice).to(dtype)[..., :width]
    assert torch.equal(row_ops.relu2(x), torch.nn.functional.relu(x).square())


def test_relu2_of_extreme_numbers(isa: str) -> None:
    x = torch.tensor([EXTREMES])
    expected = torch.nn.functional.relu(x).square()
    torch.testing.assert_close(row_ops.relu2(x), expected, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", ["silu_mul", "gelu_tanh_mul", "relu2"])
def test_a_row_is_the_same_bits_among_whatever_rows(
    isa: str, operation: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x, factor = (torch.randn(300, 528).to(dtype) for _ in range(2))
    some = [x] if operation == "relu2" else [x, factor]
    compute = getattr(row_ops, operation)
    together = compute(*some)
    alone = [compute(*(part[i : i + 1] for part in some)) for i in range(len(x))]
    assert torch.equal(together, torch.cat(alone))


@EXAMPLES
@given(
    tokens=ROWS,
    heads=st.tuples(st.integers(1, 5), st.integers(1, 3)),
    width=st.sampled_from([32, 64, 128]),
    dtype=st.sampled_from(DTYPES),
)
def test_rotate(
    isa: str, tokens: int, heads: tuple[int, int], width: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(tokens)
    q, k = (torch.randn(1, tokens, n, width).to(dtype).transpose(1, 2) for n in heads)
    angles = torch.randn(1, tokens, width // 2).repeat(1, 1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    expected = apply_rotary_pos_emb(q, k, cos, sin)
    for x, wanted in zip((q, k), expected, strict=True):
        check(row_ops.rotate(x, cos, sin), wanted)
    together = torch.cat((q, k), dim=1).transpose(1, 2).contiguous().transpose(1, 2)
    assert row_ops.rotate_(together, cos, sin) is together
    check(together, torch.cat(expected, dim=1))


def z(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (z(2, 32), z(16)),  # the weight is too short
        (z(2, 32), z(1).expand(32)),  # not dense
        (z(2, 32), z(32, dtype=torch.bfloat16)),
        (z(2, 32, dtype=torch.float64), z(32, dtype=torch.float64)),
        (z(2, 24), z(24)),
        (z(2, 32, device="meta"), z(32)),
        (z(2, 32), z(32, device="meta")),
    ],
)
def test_rms_norm_refuses_what_it_cannot_read(x: torch.Tensor, weight: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"row_ops\.rms_norm takes"):
        row_ops.rms_norm(x, weight, 1e-5)


@pytest.mark.parametrize(
    ("gate", "factor"),
    [
        (z(2, 32), z(1, 32)),  # too few rows
        (z(2, 32), z(2, 16)),
        (z(2, 24), z(2, 24)),
        (z(), z()),
        (z(2, 32), z(2, 32, dtype=torch.float16)),
        (z(2, 32), z(2, 32, device="meta")),
    ],
)
@pytest.mark.parametrize("operation", ["silu_mul", "gelu_tanh_mul"])
def test_gates_that_cannot_be_read_are_refused(
    operation: str, gate: torch.Tensor, factor: torch.Tensor
) -> None:
    with pytest.raises(ValueError, match=rf"row_ops\.{operation} takes"):
        getattr(row_ops, operation)(gate, factor)


@pytest.mark.parametrize(
    "x", [z(2, 24), z(), z(2, 32, dtype=torch.float64), z(2, 32, device="meta")]
)
def test_relu2_refuses_what_it_cannot_read(x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"row_ops\.relu2 takes"):
        row_ops.relu2(x)


@pytest.mark.parametrize(
    ("x", "cos", "sin"),
    [
        (z(1, 2, 3, 32), z(1, 2, 32), z(1, 3, 32)),  # too few tokens
        (z(1, 2, 3, 32), z(1, 3, 32), z(1, 3, 16)),
        (z(2, 2, 3, 32), z(2, 3, 32), z(2, 3, 32)),  # two batches
        (z(1, 2, 3, 48), z(1, 3, 48), z(1, 3, 48)),  # half of it is not a multiple of 16
        (z(2, 3, 32), z(2, 32), z(2, 32)),
        (z(1, 2, 3, 32), z(1, 3, 32), z(1, 3, 32, dtype=torch.float16)),
        (z(1, 2, 3, 32), z(1, 3, 32, device="meta"), z(1, 3, 32)),
    ],
)
def test_rotate_refuses_what_it_cannot_read(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> None:
    with pytest.raises(ValueError, match=r"row_ops\.rotate takes"):
        row_ops.rotate(x, cos, sin)
