"""Rotations: a Hadamard matrix in blocks, the same bits at every level, and products unchanged."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from flexinfer import _kernels
from flexinfer.runtime.rotation import (
    rotate,
    rotate_back,
    rotated_inputs,
    slow_rotate,
    slow_rotate_inputs,
)

DEPTHS = (1, 4, 6, 7, 8, 12, 16, 40, 48, 64, 96, 576, 2048, 2880)


def hadamard(size: int) -> torch.Tensor:
    """Sylvester's."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    return matrix


@pytest.mark.parametrize("depth", DEPTHS)
def test_blocks_of_a_row_are_multiplied_by_a_hadamard_matrix(depth: int) -> None:
    torch.manual_seed(depth)
    x, block = torch.randn(3, depth), rotated_inputs(depth)
    assert depth % block == 0
    assert depth // block % 2 == 1
    expected = torch.unflatten(x.double(), 1, (-1, block)) @ hadamard(block)
    torch.testing.assert_close(slow_rotate(x).double(), expected.flatten(1), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("isa", _kernels.available_quantised_isas())
@pytest.mark.parametrize("depth", DEPTHS)
def test_the_kernel_gives_the_bits_of_the_definition(
    isa: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXINFER_SIMD", isa)
    torch.manual_seed(depth)
    x = torch.randn(5, depth) * torch.tensor([1e-30, 1.0, 1e3, 1e30, 1.0])[:, None]
    x[4] = 0
    before = x.clone()
    assert torch.equal(rotate(x), slow_rotate(x))
    assert torch.equal(x, before)
    assert torch.equal(rotate(x.double()[:, :depth]), slow_rotate(x))


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_product_of_rotated_factors_is_that_of_the_factors(depth: int) -> None:
    torch.manual_seed(depth)
    x, weight = torch.randn(4, depth), torch.randn(9, depth)
    product = slow_rotate_inputs(x).double() @ rotate(weight).double().T
    torch.testing.assert_close(product, x.double() @ weight.double().T, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rotate_back(rotate(weight)), weight, rtol=1e-4, atol=1e-5)


def test_the_largest_inputs_do_not_overflow() -> None:
    x = torch.full((2, 4096), torch.finfo(torch.float32).max)
    assert slow_rotate_inputs(x).isfinite().all()
