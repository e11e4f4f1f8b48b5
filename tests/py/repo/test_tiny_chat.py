"""examples/tiny_chat: its README, and what its scripts say of what is not there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "tiny_chat"
README = (EXAMPLE / "README.md").read_text()


def test_every_file_is_in_the_table() -> None:
    named = set(re.findall(r"^\| `(\w+\.\w+)` \|", README, re.MULTILINE))
    there = {file.name for file in EXAMPLE.iterdir() if file.is_file()}
    assert named == there - {"README.md"}


def test_the_program_of_the_readme_prints_a_whole_answer_alone() -> None:
    """It was cut, behind a warning that no length was given."""
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ran.stdout.startswith("Nice to meet you, Clara")
    assert ran.stdout.rstrip()[-1] in ".!?"
    assert "max_new_tokens" not in ran.stderr


def test_a_folder_without_a_model_is_one_line() -> None:
    """It was a traceback of transformers."""
    ran = subprocess.run(
        [sys.executable, str(EXAMPLE / "evaluate.py"), "--folder", "/nope"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 2
    assert "error: --folder: there is no model in '/nope'" in ran.stderr
    assert "Traceback" not in ran.stderr
