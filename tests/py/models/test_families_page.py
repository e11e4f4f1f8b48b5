"""docs/families.md says of each causal architecture of transformers what the engine does."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")

from helpers.every_architecture import MODEL_TYPES
from helpers.family_trial import KINDS, count_sentences, kind_of, try_family

PAGE = Path(__file__).parents[3] / "docs" / "families.md"
ROWS = dict(
    re.findall(r"^\| ([\w-]+) \| (works|refused: .*|not tried: .*) \|$", PAGE.read_text(), re.M)
)
VERSION = transformers.__version__
pytestmark = pytest.mark.skipif(
    f"by transformers {VERSION}" not in PAGE.read_text(), reason="the page is of another version"
)


def test_the_page_has_each_architecture_and_counts_them() -> None:
    assert list(ROWS) == list(MODEL_TYPES), "transformers has others than the page: `make families`"
    counts = Counter(map(kind_of, ROWS.values()))
    for kind in KINDS:
        assert f"\n| {kind} | {counts[kind]} |\n" in PAGE.read_text()
    assert f"\n{count_sentences(counts, VERSION)}\n" in PAGE.read_text()


# One of each kind that the page tells apart; all of them are tried where there is time.
SOME = (
    "gemma4",
    "llama4",
    "longcat_flash",
    "mllama",
    "mimo_v2_flash",
    "glm_moe_dsa",
    "qwen3_next",
    "zaya",
    "bert",
    "stablelm",
    "git",
    "bloom",
)


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=() if name in SOME else pytest.mark.slow) for name in MODEL_TYPES],
)
def test_the_page_says_what_the_engine_does(model_type: str) -> None:
    assert try_family(model_type) == ROWS[model_type]
