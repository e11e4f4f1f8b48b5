"""What malloc keeps, in processes whose malloc nobody has set by the environment."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

from flexinfer.cli.settings import SHIPPED_MODEL

PRINT_ARENAS = """
import ctypes
libc = ctypes.CDLL(None); libc.fdopen.restype = ctypes.c_void_p
file = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, file); libc.fflush(file)
"""


@pytest.mark.parametrize(
    "call",
    [
        "set_up_torch(1); may_begin.set(); work()",
        "t = Thread(target=work); t.start(); set_up_torch(1); may_begin.set(); t.join()",
    ],
)
def test_memory_that_malloc_keeps_can_be_given_back(call: str) -> None:
    """In the first thread, and in one that had an arena of its own before there was an engine."""
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("not glibc")
    code = (
        "import mmap\nfrom pathlib import Path\nfrom threading import Event, Thread\n"
        "from flexinfer.runtime.malloc import return_freed_memory\n"
        "from flexinfer.runtime.torch_settings import set_up_torch\n"
        "may_begin = Event()\n"
        "def resident_mib():\n"
        "    words = Path('/proc/self/statm').read_text().split()\n"
        "    return int(words[1]) * mmap.PAGESIZE / 2**20\n"
        "def work():\n"
        "    may_begin.wait()\n"
        "    blocks = [bytearray(b'x' * 2**20) for _ in range(40)]\n"
        "    del blocks\n"
        "    before = resident_mib()\n"
        "    return_freed_memory()\n"
        "    print(before - resident_mib())\n"
        f"{call}"
    )
    assert number_with_own_malloc(code) > 32


def test_threads_of_an_engine_share_one_arena() -> None:
    """Each keeps what its threads have freed: a server's resident set grew with them. Those that
    the start tries are the first of all."""
    if not hasattr(ctypes.CDLL(None), "malloc_info"):
        pytest.skip("not glibc")
    code = (
        "from flexinfer import LLM\n"
        f"with LLM({str(SHIPPED_MODEL)!r}, device='cpu', kv_cache_memory_bytes=1 << 20): pass\n"
    )
    assert printed_with_own_malloc(code + PRINT_ARENAS).count("<heap ") == 1


def test_weights_loaded_apart_leave_no_hole_in_the_heap() -> None:
    """Blocks that were allocated in turns with small ones go back to the system when freed."""
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("not glibc, or an old one")
    code = (
        "import ctypes\n"
        "from flexinfer.runtime.malloc import large_blocks_apart\n"
        "from flexinfer.runtime.torch_settings import set_up_torch\n"
        "set_up_torch(1)\n"
        "import torch\n"
        "class Info(ctypes.Structure):\n"
        "    _fields_ = [(n, ctypes.c_size_t) for n in 'abcdefghij']\n"
        "mallinfo = ctypes.CDLL(None).mallinfo2; mallinfo.restype = Info\n"
        "before = mallinfo().a  # bytes of the heap\n"
        "with large_blocks_apart():\n"
        "    pairs = [(torch.ones(1 << 20), torch.ones(1 << 12)) for _ in range(32)]\n"
        "    kept = [small for _, small in pairs]; del pairs\n"
        "print(mallinfo().a - before)"
    )
    # Its end, 32 MiB kept ready since torch was loaded, may be used up; 128 MiB were allocated.
    assert number_with_own_malloc(code) < 40 << 20


def number_with_own_malloc(code: str) -> float:
    """What the program prints, in a process whose malloc nobody has set by the environment."""
    return float(printed_with_own_malloc(code))


def printed_with_own_malloc(code: str) -> str:
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MALLOC_") and name != "GLIBC_TUNABLES"
    }
    result = subprocess.run(
        [sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=True
    )
    return result.stdout
