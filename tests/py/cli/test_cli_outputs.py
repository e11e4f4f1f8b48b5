"""Files that a command could not write, and a driver that refuses: one line, before any work."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from flexinfer.cli.app import app
from flexinfer.cli.errors import check_folder, usage_errors
from flexinfer.cli.result_file import result_file
from flexinfer.cli.standard_output import STANDARD_OUTPUT
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


def test_a_result_takes_the_place_of_what_was_there(tmp_path: Path) -> None:
    for _ in range(2):
        with result_file(tmp_path / "m.json") as file:
            file.write_text("{}")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("m.json", "{}")]


def write_half(path: Path) -> None:
    with result_file(path) as file:
        file.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("was_there", [True, False])
def test_a_result_that_cannot_be_written_whole_changes_nothing(
    was_there: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.json"
    if was_there:
        path.write_text("before")
    with pytest.raises(typer.Exit) as caught:
        write_half(path)
    assert caught.value.exit_code == 1
    assert capsys.readouterr().err.startswith(f"flexinfer: {path} is not written: the disk is full")
    left = [(file.name, file.read_text()) for file in tmp_path.iterdir()]
    assert left == [("m.json", "before")] * was_there


def test_what_is_no_plain_file_is_written_itself(tmp_path: Path) -> None:
    pointed = tmp_path / "elsewhere"
    link = tmp_path / "m.json"
    link.symlink_to(pointed)
    for file in (link, Path("/dev/stdout")):
        with result_file(file) as part:
            assert part == file


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_command_whose_numbers_find_no_room_prints_them_and_fails() -> None:
    result = CliRunner().invoke(app, [*STEP, "--json", "/dev/full"])
    assert result.exit_code == 1
    assert result.stderr.startswith("flexinfer: /dev/full is not written: the disk is full")
    assert "new tokens/s" in result.stdout


def run_with_stdout(command: list[str], stdout: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flexinfer.cli", *command],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("command", [["--version"], ["bench", "--help"], ["doctor", "--json"]])
def test_a_standard_output_without_room_is_one_line(command: list[str]) -> None:
    """It was a traceback, or an exit code of 120."""
    with open("/dev/full", "w") as full:
        ended = run_with_stdout(command, full.fileno())
    assert ended.returncode == 2
    assert ended.stderr.startswith("flexinfer: cannot use standard output: the disk is full")
    assert ended.stderr.count("\n") == 1


def test_a_reader_that_has_read_enough_is_told_nothing() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = run_with_stdout(["doctor", "--json"], writing)
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_of_an_error_of_standard_output_no_command_speaks_for_itself() -> None:
    """It would call a closed pipe a mistake of the user's."""
    with pytest.raises(BrokenPipeError), usage_errors():
        raise BrokenPipeError(errno.EPIPE, "Broken pipe", STANDARD_OUTPUT)


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
