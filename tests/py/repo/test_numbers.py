"""Numbers in pages name their files, and every file of numbers is read in a page."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BENCHMARKS = ROOT / "benchmarks"
RESULTS = sorted((BENCHMARKS / "results").glob("*/*.json"))
PAGES = sorted(set(BENCHMARKS.glob("*/README.md")) - {BENCHMARKS / "results" / "README.md"})
FOLDERS = {page.parent.name for page in PAGES}
NOT_MEASURED = "not measured yet"
MEASURED = re.compile(r"\d[\d,.]* ?(?:times|%|ms\b|us\b|MiB|GiB|tokens (?:a|per) second)")
NAMED = re.compile(r"[\w.*<>/-]*[\w>*](?:\.json)")
SHORT = re.compile(r"`(?:\.\.\.|…)(_\w+)(?:\.json)?`")


def patterns(page: Path) -> list[str]:
    """The names of result files in a page; `<dtype>` and `...` stand for anything."""
    text = page.read_text(encoding="utf-8")
    names = [re.sub(r"<\w+>", "*", name).rpartition("/")[2] for name in NAMED.findall(text)]
    return names + [f"{page.parent.name}*{ending}.json" for ending in SHORT.findall(text)]


def files_of(page: Path) -> list[Path]:
    names = patterns(page)
    return [path for path in RESULTS if any(fnmatch(path.name, name) for name in names)]


def has_numbers(page: Path) -> bool:
    """They have a day."""
    text = page.read_text(encoding="utf-8")
    return bool(re.search(r"\d{4}-\d\d-\d\d", text)) and NOT_MEASURED not in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_a_page_with_numbers_names_their_file(page: Path) -> None:
    assert files_of(page) or not has_numbers(page)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_a_page_of_the_docs_with_measurements_leads_to_their_files(page: Path) -> None:
    """Itself, or by the page of a benchmark."""
    text = " ".join(page.read_text(encoding="utf-8").split())
    if re.search(r"\d{4}-\d\d-\d\d", text) and MEASURED.search(text):
        names = set(re.findall(r"benchmarks/(\w+)", text))
        read = [files_of(BENCHMARKS / name / "README.md") for name in names & FOLDERS]
        assert files_of(page) or any(read)


def test_every_result_is_read_in_a_page() -> None:
    docs = (ROOT / "docs").glob("*.md")
    read = {path for page in (*PAGES, *docs) for path in files_of(page)}
    assert [str(path.relative_to(BENCHMARKS)) for path in RESULTS if path not in read] == []


def test_a_measurement_in_the_readme_leads_to_its_file() -> None:
    """By the page of its benchmark, in the same paragraph."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    found = [part for part in text.split("\n\n") if MEASURED.search(part)]
    assert len(found) >= 3
    for part in found:
        linked = re.findall(r"\]\((benchmarks/\w+/README\.md)\)", part)
        assert any(files_of(ROOT / page) for page in linked), part
