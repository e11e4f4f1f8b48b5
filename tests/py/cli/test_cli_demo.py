"""`flexinfer demo` from end to end, on a tiny random model, and that it can fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flexinfer.cli.app import app
from flexinfer.cli.demo.script import parse_script
from helpers.cli_folder import make_folder

SIZES = ("--conversations", "2", "--turns", "3", "--max-tokens", "8", "--memory", "16MiB")


def run_demo(folder: str, *arguments: str) -> tuple[int, str]:
    command = ["demo", "--model", folder, *SIZES, "--chunk-bytes", "4KiB", *arguments]
    result = CliRunner().invoke(app, command)
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def outcome(folder: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, Any, Path]:
    out = tmp_path_factory.mktemp("out")
    pytest.importorskip("matplotlib")
    written = ("--json", str(out / "demo.json"), "--plot", str(out / "memory.svg"))
    code, text = run_demo(folder, *written)
    return code, text, json.loads((out / "demo.json").read_text()), out


def test_the_demo_passes(outcome: tuple[int, str, Any, Path]) -> None:
    code, text, numbers, _ = outcome
    assert code == 0, text
    assert "flexinfer demo: PASSED" in text
    assert numbers["passed"]


def test_the_demo_shows_text_tables_and_map(outcome: tuple[int, str, Any, Path]) -> None:
    text = outcome[1]
    for part in ("turn 3 of 3", "> Who am I?", "aliased", "copied", "no cache"):
        assert part in text
    assert "Memory map" in text
    assert "in conversations 1, 2" in text
    assert "with sharing (measured)" in text


def test_later_turns_compute_only_what_is_new(outcome: tuple[int, str, Any, Path]) -> None:
    for turn in outcome[2]["with_prefix_cache"]["turns"]:
        if turn["turn"] > 1:
            assert turn["num_computed_tokens"] <= turn["num_new_tokens"] + 1
            assert turn["chunks_aliased"] > 0
    assert all(t["num_reused_tokens"] == 0 for t in outcome[2]["without_prefix_cache"]["turns"])


def test_sharing_needs_less_memory(outcome: tuple[int, str, Any, Path]) -> None:
    assert outcome[2]["peak_bytes_shared"] < outcome[2]["peak_bytes_unshared"]


def test_the_picture_is_drawn(outcome: tuple[int, str, Any, Path]) -> None:
    assert "<svg" in (outcome[3] / "memory.svg").read_text()


def test_the_dense_layout_passes_too(folder: str) -> None:
    code, text = run_demo(folder, "--layers-per-plane", "1")
    assert code == 0, text
    assert "first of 8 planes" in text


def test_a_model_without_chat_template_gets_plain_text(tmp_path: Path) -> None:
    code, text = run_demo(make_folder(tmp_path, chat_template=None))
    assert code == 0, text
    assert "no chat template" in text


def test_a_wrong_answer_fails_the_demo(tmp_path: Path) -> None:
    code, text = run_demo(make_folder(tmp_path, expect="what no random model says"))
    assert code == 1
    assert "conversation 1, turn 3: 'what no random model says' is not in" in text
    assert "flexinfer demo: FAILED" in text


def test_a_cache_that_forgets_fails_the_demo(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from flexinfer.scheduler.scheduler import Scheduler

    monkeypatch.setattr(Scheduler, "_record", lambda *_: None)
    code, text = run_demo(folder)
    assert code == 1
    assert "only 2" in text or "are new" in text
    assert "later turns computed only their new tokens" in text.splitlines()[-1]


def test_a_cache_that_corrupts_fails_the_demo(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from flexinfer.vtensor import VTensorManager

    create = VTensorManager.try_create

    def poisoned(self: VTensorManager, tokens: Any = None, **options: Any) -> Any:
        vtensor = create(self, tokens, **options)
        if vtensor is not None and vtensor.num_cached_tokens:
            self.v(0)[vtensor.slot, : vtensor.num_cached_tokens] += 10.0
        return vtensor

    monkeypatch.setattr(VTensorManager, "try_create", poisoned)
    code, text = run_demo(folder)
    assert code == 1
    assert "not true: both runs gave identical tokens" in text


def test_a_prompt_too_long_says_so(folder: str) -> None:
    code, text = run_demo(folder, "--max-tokens", "200")
    assert code == 2
    assert "max_model_len" in text.splitlines()[-1]


def test_expectations_hold_only_for_the_model_they_came_with() -> None:
    text = json.dumps(
        {"system_prompt": "s", "conversations": [[{"user": "Who am I?", "expect": "Ann"}]]}
    )
    assert parse_script(text, checked=True).conversations[0][0].expect == "Ann"
    assert parse_script(text, checked=False).conversations[0][0].expect is None


def test_the_shipped_model_passes_its_demo() -> None:
    result = CliRunner().invoke(app, ["demo", "--memory", "64MiB"])
    assert result.exit_code == 0, result.output
    assert "every answer holds" in result.output


def test_a_short_budget_is_named_as_the_reason(folder: str) -> None:
    code, text = run_demo(folder, "--memory", "192KiB")
    assert code == 1
    assert "were evicted" in text
