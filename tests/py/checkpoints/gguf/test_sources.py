"""Sources: some outputs of a tensor are those of all of it, whatever was done to its rows."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")

import hypothesis
from hypothesis import strategies as st

from flexinfer.checkpoints.gguf.header import read_header
from flexinfer.checkpoints.gguf.sources import Changed, Given, Ordered, Source, Stored, Woven
from helpers.gguf.files import Type, write_gguf
from helpers.gguf.models import CONFIGS, same
from helpers.tiny_models import draw_model

NAME = "blk.0.attn_q.weight"
ROWS = 256


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    path = tmp_path_factory.mktemp("sources") / "model.gguf"
    write_gguf(path, draw_model(CONFIGS["llama"]()), same(Type.Q8_0))
    return Stored(read_header(str(path)).tensors[NAME])


@hypothesis.given(
    seed=st.integers(0, 1 << 20), first=st.integers(0, ROWS - 1), count=st.integers(1, ROWS)
)
def test_some_outputs_are_those_of_the_whole(
    seed: int, first: int, count: int, stored: Stored
) -> None:
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))
    some = slice(first, min(first + count, ROWS))
    ordered = Ordered(stored, order)
    changed = Changed(lambda weight: weight - 1, stored)
    assert torch.equal(ordered.rows(), stored.rows()[order])
    assert torch.equal(changed.floats(), stored.floats() - 1)
    numbers = torch.arange(ROWS * 2.0)
    given = [Given(numbers[::2]), Given(numbers.view(2, ROWS).T)]
    for each in given:
        assert torch.equal(each.rows().view(torch.float32).view(each.shape), each.floats())
    sources: list[Source] = [stored, ordered, Ordered(ordered, order), changed, *given]
    for source in sources:
        assert torch.equal(source.rows(some), source.rows()[some])
        if source.is_quantised:
            whole = source.quantised()[:].dequantised()
            assert torch.equal(source.quantised()[some].dequantised(), whole[some])
            assert torch.equal(whole, source.floats())


@hypothesis.given(
    seed=st.integers(0, 1 << 20), first=st.integers(0, ROWS - 1), count=st.integers(1, ROWS)
)
def test_rows_of_several_are_woven(seed: int, first: int, count: int, stored: Stored) -> None:
    order = torch.randperm(2 * ROWS, generator=torch.Generator().manual_seed(seed))
    some = slice(first, first + count)
    changed = Changed(lambda weight: -weight, stored)
    for sources in ([stored, Ordered(stored, order[order < ROWS])], [changed, changed]):
        woven, whole = Woven(sources, order), torch.cat([s.floats() for s in sources])[order]
        assert torch.equal(woven.floats(), whole)
        if woven.is_quantised:
            assert torch.equal(woven.quantised()[some].dequantised(), whole[some])
        else:
            assert torch.equal(woven.rows(some).view(torch.float32), whole[some])
