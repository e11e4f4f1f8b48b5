"""Code in the documentation runs, and does what the text around it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
MAX_LOOP_LINES = 33


def code_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The names that the page's code has defined, all of it run from top to bottom."""
    names: dict[str, Any] = {}
    for block in code_blocks("serving_loop.md"):
        exec(compile(block, "serving_loop.md", "exec"), names)
    names["manager"].check_integrity()
    return names


def continuation(page: dict[str, Any], prompt: list[int], num_new: int) -> list[int]:
    """The page's model without any KV cache."""
    heads, dim = page["HEADS"], page["DIM"]
    tokens = list(prompt)
    for _ in range(num_new):
        x = page["embedding"][tokens]
        for q, k, v, out in page["weights"]:
            parts = [(x @ w).view(-1, heads, dim).transpose(0, 1) for w in (q, k, v)]
            attended = page["attention"](*parts, is_causal=True)
            x = x + attended.transpose(0, 1).flatten(1) @ out
        tokens.append(int((x[-1] @ page["embedding"].T).argmax()))
    return tokens


def test_the_loop_gives_what_the_model_gives_without_a_cache(page: dict[str, Any]) -> None:
    for prompt, answer in zip(([61, 62], [71, 72, 73]), page["answers"], strict=True):
        assert answer == continuation(page, page["system"] + prompt, 8)
    for before, last, answer in zip(page["answers"], (63, 74), page["again"], strict=True):
        assert answer == continuation(page, [*before, last], 8)


def test_the_loop_shares_chunks(page: dict[str, Any]) -> None:
    stats = page["manager"].stats()
    assert stats.chunks_aliased > 0
    assert stats.num_vtensors == 0


def test_the_loop_is_short() -> None:
    loop = code_blocks("serving_loop.md")[0].partition("def forward")[2]
    assert len([line for line in loop.splitlines() if line.strip()]) <= MAX_LOOP_LINES


def options_of(command: Any) -> set[str]:
    """Names of the options of a command and of those below it."""
    own = {name for o in command.params for name in (*o.opts, *o.secondary_opts)}
    return own.union(*map(options_of, getattr(command, "commands", {}).values()))


def test_the_index_and_the_site_name_every_page() -> None:
    pages = {path.name for path in DOCS.glob("*.md")}
    index = set(re.findall(r"\]\((\w+\.md)\)", (DOCS / "index.md").read_text()))
    site = set(re.findall(r"^  - .*: (\w+\.md)$", (DOCS.parent / "mkdocs.yml").read_text(), re.M))
    assert index | {"index.md"} == site == pages


@pytest.mark.parametrize(
    "page_name",
    [
        "demo.md",
        "cpu_performance.md",
        "metrics.md",
        "page.md",
        "server.md",
        "serving_loop.md",
        "tools.md",
        "tracing.md",
    ],
)
def test_documented_options_and_names_exist(page_name: str) -> None:
    from typer.main import get_command

    from flexinfer.cli.app import app
    from flexinfer.vtensor import VTensorManager

    text = (DOCS / page_name).read_text()
    known = {"--help", *options_of(get_command(app))}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) <= known
    for name in re.findall(r"`manager\.(\w+)", text):
        assert hasattr(VTensorManager, name)


def test_a_request_passes_few_files_and_concepts() -> None:
    """The table of docs/request.md, with each concept a name in its file; the page is a screen."""
    page = (DOCS / "request.md").read_text()
    assert len(page.splitlines()) <= 50
    table = re.findall(r"^\| \d+ \| `([^`]+)` \|(.*)\|$", page, re.M)
    concepts = {file: re.findall(r"`(\w+)`", names) for file, names in table}
    assert 8 <= len(table) <= 12
    assert 15 <= len({name for names in concepts.values() for name in names}) <= 25
    for file, names in concepts.items():
        text = (ROOT / file).read_text()
        assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []


def test_the_python_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """With the shipped model in place of the one that a hub has."""
    from flexinfer.cli.settings import SHIPPED_MODEL

    readme = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    for block in blocks:
        assert "Qwen/Qwen3-0.6B" in block or names
        exec(
            compile(block.replace("Qwen/Qwen3-0.6B", str(SHIPPED_MODEL)), "README.md", "exec"),
            names,
        )
    names["llm"].close()
    printed = capsys.readouterr().out.splitlines()
    assert "Ada" in printed[-1]
    assert not printed[-1].endswith("(0 prompt tokens came from the cache)")


def test_the_readme_says_what_its_chart_shows() -> None:
    import sys

    sys.path.insert(0, str(ROOT / "benchmarks" / "serving"))
    from chart import bars, ratio

    readme = (ROOT / "README.md").read_text()
    for ours, theirs in bars():
        assert f"{ratio(ours, theirs).split()[0]} times" in readme
