"""Row operations equal torch's own, for every instruction set, dtype and shape."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
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
def test_silu_mul_refuses_what_it_cannot_read(gate: torch.Tensor, factor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"row_ops\.silu_mul takes"):
        row_ops.silu_mul(gate, factor)


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
