"""Quantised weights: as checkpoints have them and nothing here makes them, and as a layer gives
them back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from flexinfer.layers.codebook import Codebook
from flexinfer.layers.quantised import QuantisedTensor, Scheme
from flexinfer.layers.quantised_linear import QuantisedLinear


def bytes_in_groups(
    group: int, has_minimums: bool, has_byte_inputs: bool, weight: torch.Tensor
) -> QuantisedTensor:
    """8 bits; group 0: by output."""
    groups = weight.view(len(weight), -1, group or weight.shape[1])
    scales = groups.abs().amax(dim=2) / 127
    integers = (groups / scales[:, :, None]).round().to(torch.int8).view(weight.shape)
    minimums = 0.1 * torch.randn(scales.shape) if has_minimums else None
    source = QuantisedTensor(integers, scales, minimums, 8, groups.shape[2])
    return source.with_byte_inputs() if has_byte_inputs else source


def nibbles_in_large_scales(weight: torch.Tensor) -> QuantisedTensor:
    """4 bits whose scales float16 cannot hold, with minimums, and inputs of 8 bits: as Q4_K."""
    source = Scheme.parse("int4-zp").quantise(weight)
    assert source.minimums is not None
    scales, minimums = (numbers * 1.0001 for numbers in (source.scales, source.minimums))
    return QuantisedTensor(source.integers, scales, minimums, 4, 32, byte_inputs=True)


def six_bits(has_minimums: bool, has_byte_inputs: bool, weight: torch.Tensor) -> QuantisedTensor:
    """Of which five are used, in scales of float16: as Q5_0 and Q5_1."""
    groups = weight.view(len(weight), -1, 32)
    scales = (groups.abs().amax(dim=2) / 15).half().float()
    integers = (groups / scales[:, :, None]).round().to(torch.int8).view(weight.shape)
    minimums = 0.1 * torch.randn(scales.shape) if has_minimums else None
    return QuantisedTensor(integers, scales, minimums, 6, 32, has_byte_inputs)


def by_codebook(
    codebook: Codebook, has_powers: bool, has_byte_inputs: bool, weight: torch.Tensor
) -> QuantisedTensor:
    """The nearest of 16 numbers, in scales that are powers of two, or of float16."""
    table = torch.tensor(codebook.numbers).float()
    groups = weight.view(len(weight), -1, 32)
    scales = groups.abs().amax(dim=2) / table.abs().max()
    scales = scales.log2().ceil().exp2() if has_powers else scales.half().float()
    distances = (groups / scales[:, :, None])[..., None] - table
    integers = (distances.abs().argmin(dim=-1) - 8).to(torch.int8).view(weight.shape)
    return QuantisedTensor(integers, scales, None, 4, 32, has_byte_inputs, codebook=codebook)


STORED: dict[str, Callable[[torch.Tensor], QuantisedTensor]] = {
    "Q6_K": partial(bytes_in_groups, 16, False, False),
    "bytes in groups of 16, minimums": partial(bytes_in_groups, 16, True, False),
    "Q8_0 a8": partial(bytes_in_groups, 32, False, True),
    "Q6_K a8": partial(bytes_in_groups, 16, False, True),
    "bytes in groups of 64, minimums, a8": partial(bytes_in_groups, 64, True, True),
    "bytes by output, minimums, a8": partial(bytes_in_groups, 0, True, True),
    "bytes by output, a8": partial(bytes_in_groups, 0, False, True),
    "Q5_0": partial(six_bits, False, False),
    "Q5_1 a8": partial(six_bits, True, True),
    "Q4_K a8": nibbles_in_large_scales,
    "MXFP4": partial(by_codebook, Codebook.E2M1, True, False),
    "MXFP4 a8": partial(by_codebook, Codebook.E2M1, True, True),
    "IQ4_NL": partial(by_codebook, Codebook.IQ4, False, False),
    "IQ4_NL a8": partial(by_codebook, Codebook.IQ4, False, True),
    "by IQ2's numbers": partial(by_codebook, Codebook.IQ2, False, False),
    "by IQ2's numbers, a8": partial(by_codebook, Codebook.IQ2, False, True),
}


def quantise(name: str, weight: torch.Tensor) -> QuantisedTensor:
    """name: of STORED, or a scheme's."""
    return STORED[name](weight) if name in STORED else Scheme.parse(name).quantise(weight)


def assert_same_rows(layer: QuantisedLinear, source: QuantisedTensor) -> None:
    """The layer gives back what it was made of, in whatever order, and as often as asked."""
    ids = torch.randint(len(source.integers), (len(source.integers) + 9,))
    rows = layer.rows(ids)
    assert rows.kind == source.kind
    assert torch.equal(rows.integers, source.integers[ids])
    assert torch.equal(rows.scales, source.scales[ids])
    assert torch.equal(rows.dequantised(), source.dequantised()[ids])
    assert layer.rows(ids[:0]).dequantised().shape == (0, source.integers.shape[1])
