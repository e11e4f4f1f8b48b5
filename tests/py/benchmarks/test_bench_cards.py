"""The GPU benchmarks' sizes on cards of 24, 80 and 141 GB, by their sizes alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import pytest

pytest.importorskip("torch")

from flexinfer.vtensor import KVSpec
from helpers.benchmark_modules import BENCHMARKS, fresh_benchmark_modules

GIB = 1 << 30
WEIGHTS_GIB = 15
"""Of Llama-3-8B in bfloat16."""
TOKEN_BYTES = 128 << 10
FREE_GIB = {"24 GB": 22, "80 GB": 78, "141 GB": 139}
Load = Callable[..., Any]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """A module of a benchmark: load("kernels", "bench")."""

    def load(folder: str, name: str) -> Any:
        for each in ("common", "gpu_common", "kernels", folder):
            monkeypatch.syspath_prepend(str(BENCHMARKS / each))
        return import_module(name)

    with fresh_benchmark_modules():
        yield load


def usable_bytes(card: str, weights_gib: int = WEIGHTS_GIB) -> int:
    return (FREE_GIB[card] - weights_gib - 4) * GIB


@pytest.mark.parametrize(("card", "num_left_out"), [("24 GB", 5), ("80 GB", 1), ("141 GB", 0)])
@pytest.mark.parametrize("layers_per_plane", [1, 8, 32])
def test_kernels_run_the_shapes_that_the_card_holds(
    load: Load, card: str, num_left_out: int, layers_per_plane: int
) -> None:
    bench, sources, cards = (load("kernels", name) for name in ("bench", "sources", "card"))
    shapes = bench.parts_of(quick=False)[0].shapes
    spec = KVSpec(32, 8, 128, "bfloat16", 32768, layers_per_plane)
    need = partial(sources.needed_bytes, spec, chunk_bytes=2 << 20)
    usable = usable_bytes(card, weights_gib=0)
    taken, left_out = cards.fitting(shapes, need, usable)
    assert len(left_out) == num_left_out
    assert need(taken) <= usable
    assert set(taken) | set(left_out) == set(shapes)


@pytest.mark.parametrize(("card", "most"), [("24 GB", 1), ("80 GB", 16), ("141 GB", 16)])
def test_end_to_end_asks_for_what_the_card_holds(load: Load, card: str, most: int) -> None:
    engines, workloads = load("end_to_end", "engines"), load("end_to_end", "workloads")
    sizes = engines.fit_sizes(workloads.FULL, TOKEN_BYTES, usable_bytes(card))
    assert sizes.max_requests == most
    assert sizes.max_len == workloads.FULL.max_len
    if card != "24 GB":
        assert sizes == workloads.FULL


@pytest.mark.parametrize(("card", "most"), [("24 GB", 16), ("80 GB", 256), ("141 GB", 256)])
def test_a_full_budget_has_as_many_requests_as_the_card_holds(
    load: Load, card: str, most: int
) -> None:
    bench = load("full_budget", "bench")
    fitted = bench.fit(bench.PUBLISHED, TOKEN_BYTES, usable_bytes(card))
    assert fitted.max_num_seqs == most
    budget = fitted.kv_bytes(TOKEN_BYTES)
    large = bench.Run("flexinfer", "", 1, None, {}, row_bytes=64 * (8 << 20))
    small = bench.Run("flexinfer", "", 1, None, {}, row_bytes=64 * (2 << 20))
    assert bench.needed_bytes(small, fitted, budget) <= usable_bytes(card) or card == "24 GB"
    assert (bench.needed_bytes(large, fitted, budget) <= usable_bytes(card)) is (card == "141 GB")


@pytest.mark.parametrize("card", FREE_GIB)
def test_overlap_has_as_many_requests_as_the_card_holds(load: Load, card: str) -> None:
    bench, cards = load("gpu_overlap", "bench"), load("gpu_overlap", "card")
    usable = usable_bytes(card)
    for wanted in bench.settings_of(quick=False):
        fitted = cards.shrink(wanted, bench.Setting.halved, lambda one: one.kv_bytes, usable)
        assert fitted.kv_bytes <= usable
        assert fitted.num_requests == wanted.num_requests or card == "24 GB"


def test_on_a_cpu_nothing_is_bounded(load: Load) -> None:
    cards = load("gpu_overlap", "card")
    assert cards.usable_bytes("cpu") is None
    assert cards.fitting([1, 2], sum, None) == ((1, 2), ())
    assert cards.shrink(5, lambda n: n - 1, lambda n: n, None) == 5
    assert cards.shrink(5, lambda n: max(3, n - 1), lambda n: n, 1) == 3
