"""The manager under NVIDIA's compute-sanitizer, where it is installed and admits the device."""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "sanitized.py"
TOOLS = ("memcheck",)


def test_the_program_under_test_is_right(device: str) -> None:
    done = run([], device)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "ok"


@pytest.mark.gpu
@pytest.mark.parametrize("tool", TOOLS)
def test_compute_sanitizer_finds_nothing(tool: str) -> None:
    sanitizer = find_sanitizer()
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    check_under(sanitizer, tool, "cuda")


def check_under(sanitizer: str, tool: str, device: str) -> None:
    """The program under the sanitizer finds nothing; skips where that admits no device.

    Calls of the driver that fail are no finding: torch and the manager ask it what it can do.
    """
    options = ["--tool", tool, "--report-api-errors", "no", "--error-exitcode", "99"]
    done = run([sanitizer, *options], device)
    if "Device not supported" in done.stdout + done.stderr:
        pytest.skip("compute-sanitizer does not support this device (seen under gVisor)")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout


TAKES_OPTIONS = """\
#!/bin/sh
[ "$1 $3 $4 $5" = "--tool --report-api-errors no --error-exitcode" ] || exit 3
"""


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ("ERROR SUMMARY: 0 errors", None),
        ("ERROR SUMMARY: 2 errors", AssertionError),
        ("Device not supported", pytest.skip.Exception),
    ],
)
def test_what_the_sanitizer_says_is_understood(
    answer: str, outcome: type[BaseException] | None, tmp_path: Path
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"{TAKES_OPTIONS}echo '========= {answer}'\n")
    tool.chmod(0o755)
    with nullcontext() if outcome is None else pytest.raises(outcome):
        check_under(str(tool), "memcheck", "cpu")


def find_sanitizer() -> str | None:
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )


def run(prefix: list[str], device: str) -> subprocess.CompletedProcess[str]:
    command = [*prefix, sys.executable, str(PROGRAM), device]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)
