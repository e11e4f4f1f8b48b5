"""Pages of libraries are let go of where nothing is lost by it, and come back when used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from flexinfer.runtime import library_pages

LET_GO = """
import torch
from pathlib import Path
from flexinfer.runtime.library_pages import let_go_of_library_pages

def file_mib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssFile")) / 1024

def compute():
    torch.manual_seed(0)
    x = torch.randn(64, 64)
    return torch.linalg.svdvals(x @ x.T).sort().values

expected, before = compute(), file_mib()
num_bytes = let_go_of_library_pages()
after = file_mib()
assert torch.equal(compute(), expected)
try:
    torch.ones(2).view(3)
except RuntimeError:  # exceptions read tables that were let go of, too
    print(before, after, num_bytes / 2**20)
"""


def test_code_that_was_let_go_of_still_runs() -> None:
    result = subprocess.run(
        [sys.executable, "-c", LET_GO], capture_output=True, text=True, check=True
    )
    before, after, let_go = map(float, result.stdout.split())
    assert before - after > 40
    assert let_go == pytest.approx(before - after, abs=8)


def mapping(permissions: str, path: str, anonymous: int = 0, locked: int = 0) -> str:
    sizes = {"Size": 64, "Rss": 32, "Anonymous": anonymous, "Locked": locked}
    lines = [f"{name}:    {number} kB" for name, number in sizes.items()]
    head = f"7f0000000000-7f0000010000 {permissions} 00001000 00:1f 12   {path}"
    return "\n".join([head, *lines, "THPeligible:    0", "VmFlags: rd ex mr mw me", ""])


@pytest.mark.parametrize(
    ("text", "is_let_go_of"),
    [
        (mapping("r-xp", "/lib/libtorch_cpu.so"), True),
        (mapping("r--p", "/lib/libstdc++.so.6.0.30"), True),
        (mapping("r--p", "/lib/lib with spaces.so.1"), True),
        (mapping("r--p", "/lib/libtorch_cpu.so", anonymous=4), False),  # relocated
        (mapping("rw-p", "/lib/libtorch_cpu.so"), False),
        (mapping("r-xs", "/lib/libtorch_cpu.so"), False),
        (mapping("r-xp", "/lib/libtorch_cpu.so", locked=64), False),
        (mapping("r--p", "/model/model.safetensors"), False),
        (mapping("r-xp", "/usr/bin/python3.11"), False),
        (mapping("rw-p", ""), False),
    ],
)
def test_only_clean_pages_of_libraries_are_let_go_of(
    text: str, is_let_go_of: bool, tmp_path: Path
) -> None:
    smaps = tmp_path / "smaps"
    smaps.write_text(text)
    (found,) = library_pages._mappings(smaps)
    assert found.kib["Rss"] == 32
    assert found.is_as_in_its_library == is_let_go_of


def test_without_proc_nothing_happens(tmp_path: Path) -> None:
    assert not list(library_pages._mappings(tmp_path / "smaps"))
