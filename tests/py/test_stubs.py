"""The committed type stub of the extension equals the one generated from the bindings.

python/flexinfer/_vtensor.pyi is the golden file, in the place where mypy, editors and reviewers
read it; the build generates its own beside the extension module. A change of the bindings shows up
as a change of the committed stub, in the same commit.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

import flexinfer._vtensor as extension

GOLDEN = Path(__file__).resolve().parents[2] / "python" / "flexinfer" / "_vtensor.pyi"


def test_the_committed_stub_equals_the_generated_one() -> None:
    generated = Path(extension.__file__).with_name("_vtensor.pyi")
    if not generated.is_file():
        pytest.skip("this build of the extension made no stub (sanitizer builds do not)")
    diff = difflib.unified_diff(
        GOLDEN.read_text().splitlines() if GOLDEN.is_file() else [],
        generated.read_text().splitlines(),
        "committed: python/flexinfer/_vtensor.pyi",
        f"generated: {generated}",
        lineterm="",
    )
    text = "\n".join(diff)
    assert not text, f"{text}\n\nIf the change of the bindings is meant, run: make stubs"


def test_every_public_name_of_the_extension_is_in_the_stub() -> None:
    stub = GOLDEN.read_text()
    missing = [name for name in dir(extension) if not name.startswith("_") and name not in stub]
    assert not missing
