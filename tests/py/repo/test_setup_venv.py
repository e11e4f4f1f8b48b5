"""scripts/setup_venv.sh: where it looks for torch, and what it does without an answer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from helpers.stub_http_server import Reply, loopback

CALL = 'source scripts/setup_venv.sh; cpu_torch_index "$0"'


def added_index(root: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """What the script would tell pip, in a pip without settings of its own."""
    base = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return subprocess.run(
        ["bash", "-c", CALL, sys.executable],
        capture_output=True,
        text=True,
        cwd=root,
        env={**base, "PIP_CONFIG_FILE": os.devnull, **environment},
        check=True,
    )


def test_an_index_that_answers_is_added(root: Path) -> None:
    with loopback({"/cpu/torch/": Reply("<html></html>")}) as server:
        index = f"{server.url}/cpu"
        assert added_index(root, FLEXINFER_TORCH_INDEX=index).stdout.strip() == index


def test_an_index_that_does_not_answer_is_left_out_and_said(root: Path) -> None:
    with loopback({}) as server:
        done = added_index(root, FLEXINFER_TORCH_INDEX=f"{server.url}/cpu")
    assert done.stdout == ""
    assert "no answer from" in done.stderr


def test_no_index_is_asked_where_pip_was_told_where_to_look(root: Path, tmp_path: Path) -> None:
    assert added_index(root, PIP_FIND_LINKS=str(tmp_path)).stdout == ""
    assert added_index(root, FLEXINFER_TORCH_INDEX="none").stdout == ""
