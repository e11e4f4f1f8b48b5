"""QuantisedRows: what is made of a weight some outputs at a time is what is made of all of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexinfer.layers.quantised import QuantisedTensor, Scheme, quantise_groups, quantise_outputs
from flexinfer.layers.quantised_panels import PANEL_COLUMNS, QuantisedPanels
from flexinfer.layers.quantised_rows import QuantisedRows, join
from flexinfer.layers.scale_levels import ScaleLevels
from flexinfer.runtime import pieces
from flexinfer.runtime.kernels import SCALE_BLOCK

FORMS = [("int8", 0), ("int4", 0), ("int4-zp", 0), ("int8", 1), ("int8", 2), ("by output", 0)]
"""Names of schemes, and levels of their scales; of int8 with levels there are groups. "by output":
8 bits with a scale an output, inputs as they are."""


def source_of(columns: int, depth: int, form: int, seed: int) -> QuantisedTensor:
    weight = torch.randn(columns, depth, generator=torch.Generator().manual_seed(seed))
    name, num_levels = FORMS[form]
    if name == "by output":
        return replace(quantise_outputs(weight), group=weight.shape[1], byte_inputs=False)
    if num_levels == 0:
        return Scheme.parse(name).quantise(weight)
    integers = quantise_groups(weight, 32, False).integers
    factors = weight.abs()[:, ::SCALE_BLOCK].half()
    level = ScaleLevels(1 + integers[:, ::32].abs(), factors)
    return QuantisedTensor.in_levels(integers, 8, 32, *[level] * num_levels)


def rows_of(source: QuantisedTensor) -> QuantisedRows:
    return QuantisedRows(source.shape, source.__getitem__)


def same(first: QuantisedTensor, second: QuantisedTensor) -> bool:
    tables = [
        [source.integers, *source.numbers, *(part for level in source.levels for part in level)]
        for source in (first, second)
    ]
    return first.kind == second.kind and all(map(torch.equal, *tables))


@pytest.mark.parametrize("form", range(len(FORMS)))
@pytest.mark.parametrize("in_groups", [None, False, True])
@settings(max_examples=15)
@given(
    columns=st.integers(1, 300),
    seed=st.integers(0, 1 << 20),
    piece=st.sampled_from([1, 1 << 15, 1 << 20]),
)
def test_panels_are_those_of_the_whole(
    columns: int, form: int, in_groups: bool | None, seed: int, piece: int
) -> None:
    source = source_of(columns, 256, form, seed)
    rows = rows_of(source)
    assert rows.shape == source.shape
    weight = rows
    if in_groups is not None:
        source, weight = source.with_byte_inputs(in_groups), rows.with_byte_inputs(in_groups)
    assert weight.kind == source.kind
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "BYTES_OF_PIECE", piece)
        found = QuantisedPanels(weight).parts
        assert same(weight.whole(), source)
        assert torch.equal(weight.dequantised_to(torch.float32), source.dequantised())
    wanted = QuantisedPanels(source).parts
    assert found.keys() == wanted.keys()
    for name, table in wanted.items():
        assert table.dtype == found[name].dtype
        assert torch.equal(table.view(torch.uint8), found[name].view(torch.uint8))


@given(
    parts=st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=4),
    form=st.integers(0, len(FORMS) - 1),
    data=st.data(),
)
def test_joined_they_are_one_after_the_other(
    parts: list[tuple[int, bool]], form: int, data: st.DataObject
) -> None:
    tensors = [source_of(columns, 256, form, i) for i, (columns, _) in enumerate(parts)]
    of_rows = [is_made for _, is_made in parts]
    joined = join([rows_of(t) if made else t for t, made in zip(tensors, of_rows, strict=True)])
    whole = QuantisedTensor.join(tensors)
    assert joined.shape == whole.shape
    assert joined.kind == whole.kind
    first = data.draw(st.integers(0, whole.shape[0] - 1))
    end = data.draw(st.integers(first + 1, whole.shape[0]))
    for some in (slice(first, end), slice(first, None), slice(None)):
        assert same(joined[some], whole[some])


def test_unlike_ones_are_not_joined() -> None:
    source = source_of(4, 256, 0, 0)
    for other in (source_of(4, 256, 1, 0), source_of(4, 512, 0, 0), replace(source, group=32)):
        with pytest.raises(ValueError, match="different kinds cannot be joined"):
            join([rows_of(source), other])


@pytest.mark.parametrize("form", range(len(FORMS)))
def test_no_more_than_a_piece_is_made_at_a_time(form: int) -> None:
    source, made = source_of(20 * PANEL_COLUMNS, 2048, form, 0), []

    def make(some: slice) -> QuantisedTensor:
        made.append(some.stop - some.start)
        return source[some]

    QuantisedPanels(QuantisedRows(source.shape, make))
    assert max(made) * 2048 <= pieces.BYTES_OF_PIECE
    assert sum(made) <= source.shape[0] + 2  # its kind and tables are seen in a row
