"""Files that a command could not write, and a driver that refuses: one line, before any work."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from flexinfer.cli.app import app
from flexinfer.cli.errors import check_folder, usage_errors
from flexinfer.errors import DriverError, RankError

STEP = ("bench", "step", "--requests", "1", "--prompt-tokens", "4", "--new-tokens", "2")
SIMULATE = ("simulate", "--trace", "/no/such/trace.csv")
SERVE = ("bench", "serve", "--base-url", "http://127.0.0.1:9", "--save-result", "--result-dir")


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ((*SIMULATE, "--json", "/no/such/m.json"), "--json: the folder of"),
        ((*SIMULATE, "--json", "/"), "--json: '/' is a folder; name a file"),
        ((*SIMULATE, "--save-step-cost", "/no/such/m.json"), "--save-step-cost: the folder"),
        ((*STEP, "--json", "/no/such/m.json"), "--json: the folder of"),
        ((*STEP, "--json", "/"), "--json: '/' is a folder; name a file"),
        (("demo", "--json", "/"), "--json: '/' is a folder; name a file"),
        ((*SERVE, "/no/such"), "--result-dir: the folder of '/no/such/openai.json' does not exist"),
    ],
)
def test_what_can_not_be_written_is_said_before_any_work(
    command: tuple[str, ...], says: str
) -> None:
    result = CliRunner().invoke(app, list(command))
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_file_that_this_user_may_not_write_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_folder(tmp_path / "m.json", "--json")
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(ValueError, match=r"--json: this user may not write .*m\.json"):
        check_folder(tmp_path / "m.json", "--json")


@pytest.mark.parametrize(
    "refused",
    [
        DriverError("open(directory=/no/such) failed with No such file or directory (2)"),
        RankError(1, "failed: 'model.safetensors' is no whole safetensors file"),
    ],
)
def test_what_a_driver_or_a_rank_refuses_is_one_line(
    refused: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit), usage_errors():
        raise refused
    assert capsys.readouterr().err == f"flexinfer: {refused}\n"


def test_an_error_of_another_kind_is_not_swallowed() -> None:
    with pytest.raises(RuntimeError), usage_errors():
        raise RuntimeError
