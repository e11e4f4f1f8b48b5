"""QuantisedPanels: the words that kernels read hold each integer where calls/quantised.h says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexinfer.layers.quantised import QuantisedTensor
from flexinfer.layers.quantised_panels import (
    PANEL_COLUMNS,
    STEP_INPUTS,
    QuantisedPanels,
)

FOURS = ((0, 4, 1, 5), (2, 6, 3, 7), (8, 12, 9, 13), (10, 14, 11, 15))
"""Inputs of a step of 4 or 6 bits, as they stand in a word's bytes."""


def source_of(integers: torch.Tensor, bits: int, group: int, byte_inputs: bool) -> QuantisedTensor:
    scales = torch.ones(len(integers), integers.shape[1] // group if group else 1)
    return QuantisedTensor(integers, scales, None, bits, group, byte_inputs)


def slow_word(numbers: list[int], bits: int, word: int) -> int:
    """Of one output's step; numbers: from 0 on where they stand so."""
    if bits == 8:
        return sum((n & 255) << 8 * i for i, n in enumerate(numbers))
    found = sum(numbers[k] << 8 * i for i, k in enumerate(FOURS[word]))
    if bits == 4:
        return found | sum(numbers[k] << 8 * i + 4 for i, k in enumerate(FOURS[1]))
    return found | sum((numbers[k] >> 2 * word & 3) << 8 * i + 6 for i, k in enumerate(FOURS[3]))


@given(
    bits=st.sampled_from([4, 6, 8]),
    columns=st.integers(1, 200),
    steps=st.integers(1, 40),
    has_groups=st.booleans(),
    byte_inputs=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_each_integer_stands_where_kernels_look_for_it(
    bits: int, columns: int, steps: int, has_groups: bool, byte_inputs: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs, half = STEP_INPUTS[bits], 1 << bits - 1
    group = inputs if has_groups or bits < 8 else 0
    integers = torch.randint(
        -half, half, (columns, steps * inputs), generator=generator, dtype=torch.int8
    )
    words = QuantisedPanels(source_of(integers, bits, group, byte_inputs or not group)).words
    zero = half if bits < 8 or (group and byte_inputs) else 0
    panels = -(-columns // PANEL_COLUMNS)
    assert words.shape == (panels, steps, inputs * bits // 32, PANEL_COLUMNS)
    columns_seen = {0, columns - 1, int(torch.randint(columns, (1,), generator=generator))}
    for column in sorted(columns_seen | {PANEL_COLUMNS * panels - 1}):  # zeros fill the last panel
        row = integers[column] if column < columns else torch.zeros_like(integers[0])
        for step in {0, steps // 2, steps - 1}:
            own = (row[step * inputs : (step + 1) * inputs].int() + zero).tolist()
            found = words[column // PANEL_COLUMNS, step, :, column % PANEL_COLUMNS]
            wanted = [slow_word(own, bits, word) for word in range(len(found))]
            assert [n & 0xFFFFFFFF for n in found.tolist()] == wanted


@pytest.mark.parametrize("bits", [4, 6])
@pytest.mark.parametrize("place", [(0, 0), (64, 31), (99, 63)])
@pytest.mark.parametrize("sign", [1, -1])
def test_integers_of_more_bits_are_refused(bits: int, place: tuple[int, int], sign: int) -> None:
    largest = (1 << bits - 1) - (sign > 0)
    integers = torch.zeros(100, 64, dtype=torch.int8)
    integers[place] = sign * largest
    QuantisedPanels(source_of(integers, bits, 16, False))
    integers[place] = sign * (largest + 1)
    with pytest.raises(ValueError, match=f"a weight of {bits} bits has"):
        QuantisedPanels(source_of(integers, bits, 16, False))


def test_scales_are_kept_in_the_fewest_bytes_that_hold_them() -> None:
    """Powers of two in a byte each, but where one is zero or subnormal, which kernels would read as
    zero."""

    def dtype_of(scales: list[float], group: int = 16) -> torch.dtype:
        integers = torch.zeros(1, 16 * len(scales), dtype=torch.int8)
        source = QuantisedTensor(integers, torch.tensor([scales]), None, 4, group)
        return QuantisedPanels(source).scales.dtype

    assert dtype_of([1.0, 2.0**-126, 2.0**127]) == torch.float8_e8m0fnu
    assert dtype_of([1.0, 0.0]) == dtype_of([1.0, 1.5]) == dtype_of([1.0, -2.0]) == torch.float16
    assert dtype_of([1.0, 2.0**-127]) == dtype_of([1.0, 1.0001]) == torch.float32
