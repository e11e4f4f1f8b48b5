"""Scales in two levels are exactly those scales in float32, and integers of 6 bits those of 8: the
same bits come of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer import _kernels
from flexinfer.layers import quantised_linear
from flexinfer.layers.codebook import Codebook
from flexinfer.layers.expert_weights import ExpertWeights
from flexinfer.layers.experts import Experts
from flexinfer.layers.quantised import QuantisedTensor
from flexinfer.layers.quantised_linear import QuantisedLinear
from flexinfer.layers.scale_levels import ScaleLevels
from helpers.each_isa import each_isa
from helpers.stored_weights import assert_same_rows

isa = each_isa(quantised_linear, _kernels.available_quantised_isas())

KINDS = {
    "Q4_K": (4, 32, True),
    "Q6_K": (6, 16, False),
    "Q5_K": (6, 32, True),
    "Q3_K": (4, 16, False),
    "Q2_K": (4, 16, True),
    "IQ4_XS": (4, 32, False),
    "IQ3_XXS": (4, 32, False),
    "IQ2_S": (4, 16, False),
    "4 bits in groups of 256": (4, 256, False),
    "8 bits in groups of 32": (8, 32, False),
    "8 bits in groups of 64, minimums": (8, 64, True),
}
CODEBOOKS = {"IQ4_XS": Codebook.IQ4, "IQ3_XXS": Codebook.IQ3_XXS, "IQ2_S": Codebook.IQ2}


def draw_levels(columns: int, depth: int, group: int) -> ScaleLevels:
    """Whose factors are small or subnormal float16 numbers, of either sign."""
    integers = torch.randint(-128, 128, (columns, depth // group)).to(torch.int8)
    factors = torch.randn(columns, depth // 256) * 10.0 ** torch.randint(-7, -2, (columns, 1))
    return ScaleLevels(integers, factors.half())


def draw(kind: str, columns: int, depth: int) -> QuantisedTensor:
    bits, group, has_minimums = KINDS[kind]
    largest = 2 ** (bits - 1)
    integers = torch.randint(-largest, largest, (columns, depth)).to(torch.int8)
    levels = [draw_levels(columns, depth, group) for _ in range(1 + has_minimums)]
    return QuantisedTensor.in_levels(integers, bits, group, *levels, codebook=CODEBOOKS.get(kind))


def in_floats(source: QuantisedTensor) -> QuantisedTensor:
    return replace(source, levels=(), bits=8 if source.bits == 6 else source.bits)


@pytest.mark.parametrize("byte_inputs", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_come_back_as_they_were(kind: str, byte_inputs: bool) -> None:
    torch.manual_seed(3)
    source = replace(draw(kind, 331, 768), byte_inputs=byte_inputs)
    assert_same_rows(QuantisedLinear(source, None, torch.float32), source)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("byte_inputs", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 5, 13, 70])
def test_a_layer_gives_the_same_bits(
    isa: str, rows: int, kind: str, byte_inputs: bool, dtype: Any
) -> None:
    torch.manual_seed(rows)
    source = replace(draw(kind, 100, 768), byte_inputs=byte_inputs)
    x = torch.randn(rows, 768).to(dtype)
    output = QuantisedLinear(source, None, dtype)(x)
    assert torch.equal(output, QuantisedLinear(in_floats(source), None, dtype)(x))
    if dtype == torch.float32:
        bound = 1e-5 * output.abs().max().item()
        torch.testing.assert_close(output.double(), source.reference(x), atol=bound, rtol=0)


@pytest.mark.parametrize("byte_inputs", [False, True])
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_experts_give_the_same_bits(isa: str, kind: str, byte_inputs: bool) -> None:
    torch.manual_seed(0)
    sources = [
        [replace(draw(kind, *shape), byte_inputs=byte_inputs) for _ in range(3)]
        for shape in ((512, 256), (256, 256))
    ]
    x, weights = torch.randn(9, 256).bfloat16(), torch.rand(9, 2)
    index = torch.stack([torch.randperm(3)[:2] for _ in range(9)])
    outputs = []
    for change in (lambda source: source, in_floats):
        gate_up, down = (table([change(s) for s in part]) for part in sources)
        outputs.append(Experts([gate_up], down, torch.bfloat16)(x, index, weights))
    assert torch.equal(*outputs)


def table(weights: list[QuantisedTensor]) -> ExpertWeights:
    built = ExpertWeights(len(weights))
    for weight in weights:
        built.add(weight)
    return built


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_joined_and_cut_with_their_levels(kind: str) -> None:
    torch.manual_seed(0)
    parts = [draw(kind, columns, 512) for columns in (48, 80)]
    joined = QuantisedTensor.join(parts)
    x = torch.randn(3, 512)
    outputs = [QuantisedLinear(part, None, torch.float32)(x) for part in parts]
    output = QuantisedLinear(joined, None, torch.float32)(x)
    assert torch.equal(output, torch.cat(outputs, dim=-1))
    cut = QuantisedLinear(joined[48:], None, torch.float32)
    assert torch.equal(cut(x), outputs[1])
    assert cut.nbytes == QuantisedLinear(parts[1], None, torch.float32).nbytes


@pytest.mark.parametrize(("kind", "bits"), [("Q4_K", 4.625), ("Q6_K", 6.5625)])
def test_scales_take_a_byte_a_group_and_two_a_block(kind: str, bits: float) -> None:
    layer = QuantisedLinear(draw(kind, 128, 1024), None, torch.float32)
    assert layer.nbytes * 8 == 128 * 1024 * bits


def test_inputs_of_8_bits_keep_levels_but_for_a_single_group() -> None:
    torch.manual_seed(0)
    assert draw("Q6_K", 16, 256).with_byte_inputs().levels
    levels = draw_levels(16, 256, 256)
    source = QuantisedTensor.in_levels(torch.ones(16, 256).to(torch.int8), 8, 256, levels)
    by_output = source.with_byte_inputs()
    assert (by_output.group, by_output.levels) == (0, ())
    x = torch.randn(4, 256)
    output = QuantisedLinear(by_output, None, torch.float32)(x)
    torch.testing.assert_close(output.double(), by_output.reference(x), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_weights_with_levels_and_without_are_of_different_kinds(kind: str) -> None:
    source = draw(kind, 64, 256)
    with pytest.raises(ValueError, match="different kinds cannot be joined"):
        QuantisedTensor.join([source, in_floats(source)])
    experts = table([source])
    with pytest.raises(ValueError, match="one shape and kind"):
        experts.add(in_floats(source))


@pytest.mark.parametrize(
    ("depth", "group", "change", "message"),
    [
        (384, 32, {}, r"inputs that are a multiple of 256.*got 384 and 32"),
        (512, 512, {}, r"groups that divide 256, got 512 and 512"),
        (512, 0, {}, r"groups that divide 256, got 512 and 0"),
        (512, 32, {"integers": torch.zeros(16, 15, dtype=torch.int8)}, r"\[16, 16\] and float16"),
        (512, 32, {"integers": torch.zeros(16, 16)}, r"got torch\.float32 \[16, 16\]"),
        (512, 32, {"factors": torch.zeros(16, 1).half()}, r"float16 \[16, 2\], got"),
        (512, 32, {"factors": torch.zeros(16, 2)}, r"and torch\.float32 \[16, 2\]"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(
    depth: int, group: int, change: dict[str, Any], message: str
) -> None:
    levels = draw_levels(16, depth, group or depth)._replace(**change)
    with pytest.raises(ValueError, match=message):
        QuantisedTensor.in_levels(torch.zeros(16, depth).to(torch.int8), 4, group, levels)


@pytest.mark.parametrize("integer", [-33, 32])
def test_integers_that_six_bits_do_not_hold_are_refused(integer: int) -> None:
    source = draw("Q6_K", 16, 256)
    source.integers[3, 5] = integer
    with pytest.raises(ValueError, match="a weight of 6 bits has"):
        QuantisedLinear(source, None, torch.bfloat16)


SETTINGS = {"words": 0, "scales": 0, "sums": 0, "byte_inputs": False, "depth": 768, "columns": 16}


def kernel_weight(**settings: Any) -> None:
    plain = {"minimums": 0, "bits": 8, "group": 32, "scale_format": 0}
    plain |= {"codebook": None, "factor_unit": 1.0}
    _kernels.QuantisedWeight(**{**SETTINGS, **plain, **settings})


@pytest.mark.parametrize(("depth", "group"), [(384, 32), (512, 512), (512, 0), (768, 48)])
def test_the_kernel_refuses_them_too(depth: int, group: int) -> None:
    blocks = _kernels.SCALE_FORMATS["blocks"]
    with pytest.raises(ValueError, match="scales in blocks need groups"):
        kernel_weight(scale_format=blocks, group=group, depth=depth)
    with pytest.raises(ValueError, match="no format of scales"):
        kernel_weight(scale_format=len(_kernels.SCALE_FORMATS))


def test_the_kernel_refuses_codebooks_of_what_is_not_looked_up() -> None:
    numbers = Codebook.IQ2.numbers
    kernel_weight(bits=4, codebook=numbers)
    for settings in ({"bits": 8}, {"bits": 6}, {"group": 0}, {"minimums": 64}):
        with pytest.raises(ValueError, match="codebooks need 4 bits in groups without minimums"):
            kernel_weight(**{"bits": 4, "codebook": numbers, **settings})
    for no_codebook in (numbers[:15], (*numbers[:15], 128)):
        with pytest.raises(TypeError):
            kernel_weight(bits=4, codebook=no_codebook)
