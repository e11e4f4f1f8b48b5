"""Provenance: what a result file says of how its numbers came about; every benchmark writes it.

    write_report(path, "overlap", {"settings": ...}, load_before=...)

tests/py/repo/test_results.py refuses a committed file that lacks any of `REQUIRED`.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from flexinfer.runtime.whole_file import whole_file

REQUIRED = ("date", "command", "cpu", "cores", "load", "python", "torch", "commit")
PACKAGES = ("torch", "flexinfer", "transformers", "triton", "flash-attn")


def write_report(path: Path | None, benchmark: str, body: dict[str, Any], **more: Any) -> None:
    """Write the numbers with the environment; `more` is added to that. None: nowhere."""
    if path is None:
        return
    report = {"benchmark": benchmark, "environment": environment("cpu") | more, **body}
    write_json(path, report)
    print(f"numbers: {path}", file=sys.stderr)


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Written whole or not at all. Where that fails (the disk is full), what was there stays, and
    the program ends with one line on stderr, and the numbers on stdout."""
    text = json.dumps(report, indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as part:
            part.write_text(text, encoding="utf-8")
    except OSError as error:
        print(text)
        sys.exit(f"{path} is not written: {error.strerror}; its numbers are on stdout")


def environment(device: str) -> dict[str, Any]:
    """Date, machine, device, driver, versions, load and command."""
    row: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load": [round(value, 1) for value in os.getloadavg()],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": git_commit(),
        **{name: version_of(name) for name in PACKAGES},
    }
    if device == "cuda":
        import torch

        properties = torch.cuda.get_device_properties(0)
        row |= {
            "gpu": properties.name,
            "gpu_memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "driver": nvidia_driver(),
        }
    return row


def version_of(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def nvidia_driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown ({error})"


def git_commit() -> str:
    """The commit, with + where the tree differs from it; GPU_CHECK_COMMIT where the tree is a copy
    without its history."""
    if "GPU_CHECK_COMMIT" in os.environ:
        return os.environ["GPU_CHECK_COMMIT"]
    command = ["git", "describe", "--always", "--abbrev=7", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"
