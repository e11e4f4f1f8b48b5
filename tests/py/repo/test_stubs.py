"""The committed type stub of each extension equals the one generated from the bindings.

python/flexinfer/_vtensor.pyi and _kernels.pyi are the golden files, in the place where mypy,
editors and reviewers read them; the build generates its own beside the extension module. A change
of the bindings shows up as a change of the committed stub, in the same commit.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

import flexinfer._kernels
import flexinfer._vtensor

GOLDEN = Path(__file__).resolve().parents[3] / "python" / "flexinfer"
EXTENSIONS = {"_vtensor": flexinfer._vtensor, "_kernels": flexinfer._kernels}


@pytest.mark.parametrize("name", EXTENSIONS)
def test_the_committed_stub_equals_the_generated_one(name: str) -> None:
    generated = Path(str(EXTENSIONS[name].__file__)).with_name(f"{name}.pyi")
    if not generated.is_file():
        pytest.skip("this build of the extension made no stub (sanitizer builds do not)")
    golden = GOLDEN / f"{name}.pyi"
    diff = difflib.unified_diff(
        golden.read_text().splitlines() if golden.is_file() else [],
        generated.read_text().splitlines(),
        f"committed: python/flexinfer/{name}.pyi",
        f"generated: {generated}",
        lineterm="",
    )
    text = "\n".join(diff)
    assert not text, f"{text}\n\nIf the change of the bindings is meant, run: make stubs"


@pytest.mark.parametrize("name", EXTENSIONS)
def test_every_public_name_of_the_extension_is_in_the_stub(name: str) -> None:
    stub = (GOLDEN / f"{name}.pyi").read_text()
    public = [item for item in dir(EXTENSIONS[name]) if not item.startswith("_")]
    assert not [item for item in public if item not in stub]
