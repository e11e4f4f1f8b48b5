"""The manager under NVIDIA's compute-sanitizer, where it is installed and admits the device."""

from __future__ import annotations

import shutil
import subprocess
import sys
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
    done = run([sanitizer, "--tool", tool, "--error-exitcode", "99"], "cuda")
    if "Device not supported" in done.stdout + done.stderr:
        pytest.skip("compute-sanitizer does not support this device (seen under gVisor)")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout


def find_sanitizer() -> str | None:
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )


def run(prefix: list[str], device: str) -> subprocess.CompletedProcess[str]:
    command = [*prefix, sys.executable, str(PROGRAM), device]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)
