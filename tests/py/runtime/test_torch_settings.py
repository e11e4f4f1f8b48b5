"""torch is loaded with our threads and settings, and nothing of that stays in the environment."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from flexinfer.runtime.threads import cpu_quota
from flexinfer.runtime.torch_settings import HUGE_PAGE_BYTES, back_by_huge_pages


@pytest.mark.parametrize(
    ("environment", "threads", "count", "spin_count"),
    [
        ({}, 1, 1, "'20000'"),
        ({"OMP_NUM_THREADS": "1"}, None, 1, "'20000'"),
        ({"GOMP_SPINCOUNT": "7"}, 1, 1, "'7'"),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, 1, 1, "'0'"),
    ],
)
def test_torch_is_loaded_with_these_threads(
    environment: dict[str, str], threads: int | None, count: int, spin_count: str
) -> None:
    code = (
        "import os; from flexinfer.runtime.torch_settings import set_up_torch\n"
        "before = dict(os.environ)\n"
        f"count = set_up_torch({threads})\n"
        "import torch\n"
        "print(count, torch.get_num_threads(), dict(os.environ) == before)"
    )
    names = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "GOMP_CPU_AFFINITY")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, **environment, "OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.split() == [str(count), str(count), "True"]
    assert f"GOMP_SPINCOUNT = {spin_count}" in result.stderr


def test_large_tensors_have_huge_pages() -> None:
    """The first of them that is made decides for all: torch reads its variable then."""
    code = (
        "import mmap, re; from pathlib import Path\n"
        "from flexinfer.runtime.torch_settings import set_up_torch; set_up_torch(1)\n"
        "import torch\n"
        "def huge():\n"
        "    found = re.search(r'AnonHugePages: +([0-9]+)', Path('/proc/self/smaps_rollup')"
        ".read_text())\n"
        "    return int(found[1]) >> 10\n"
        "before = huge()\n"
        "large = torch.ones(64 << 20, dtype=torch.uint8); with_tensor = huge()\n"
        "own = mmap.mmap(-1, 64 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
        "own.madvise(mmap.MADV_HUGEPAGE); own.write(bytes(64 << 20))\n"
        "print(with_tensor - before, huge() - with_tensor)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    of_tensor, of_own = map(int, result.stdout.split())
    if of_own < 32:
        pytest.skip("the system has no huge pages, or its memory is in pieces")
    assert of_tensor >= 16


def test_threads_are_bound_but_the_process_is_not() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    if not 1 < len(cpus) == cpu_quota().num_cpus:
        pytest.skip("one CPU, or a quota of less than all: nothing is bound")
    code = (
        "import os; from flexinfer.runtime.torch_settings import set_up_torch\n"
        f"set_up_torch({len(cpus)})\n"
        "import torch; torch.ones(1 << 20).add_(1).sum()\n"
        "masks = [sorted(os.sched_getaffinity(int(t))) for t in os.listdir('/proc/self/task')]\n"
        "print(sorted(os.sched_getaffinity(0)), sum(len(m) == 1 for m in masks))"
    )
    names = ("OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    result = subprocess.run(
        [sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == f"{cpus} {len(cpus) - 1}"


@pytest.mark.parametrize(("chosen", "num_compiled"), [(None, 2), (1000, 1)])
def test_few_compiled_products_are_kept(chosen: int | None, num_compiled: int) -> None:
    """A product of 1 row is asked for again after many others, by a thread as the engine's: it must
    have left both oneDNN's and ideep's cache. `chosen`: the user's own number for both."""
    import torch

    from flexinfer.layers.onednn_linear import can_pack
    from flexinfer.runtime.torch_settings import CACHED_PRIMITIVES, PRIMITIVE_CACHES

    if not can_pack(torch.float32, torch.device("cpu")):
        pytest.skip("torch without oneDNN's packed products")
    code = (
        "import threading\n"
        "from flexinfer.runtime.torch_settings import bound_primitive_caches, set_up_torch\n"
        "set_up_torch(1)\n"
        "import torch\n"
        "from flexinfer.layers.onednn_linear import linear_pointwise, pack_weight\n"
        "weight = pack_weight(torch.zeros(32, 32))\n"
        "def multiply():\n"
        "    bound_primitive_caches()\n"
        f"    for rows in (*range(1, {CACHED_PRIMITIVES + 3}), 1):\n"
        "        linear_pointwise(torch.zeros(rows, 32), weight, None, 'none', [], '')\n"
        "thread = threading.Thread(target=multiply)\n"
        "thread.start(); thread.join()"
    )
    clean = {name: value for name, value in os.environ.items() if name not in PRIMITIVE_CACHES}
    own = {} if chosen is None else dict.fromkeys(PRIMITIVE_CACHES, str(chosen))
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, **own, "ONEDNN_VERBOSE": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line for line in result.stdout.splitlines() if "mb1ic32oc32" in line]
    assert sum("create:cache_miss" in line for line in lines) == num_compiled


def test_compiling_without_a_compiler_is_refused_before_the_model_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from flexinfer import LLM
    from flexinfer.runtime.torch_settings import check_can_compile

    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match="there is no 'no-such-compiler' on the PATH"):
        LLM("/no/such/folder", device="cpu", compile=True)
    check_can_compile("cuda")
    monkeypatch.setenv("CXX", sys.executable)
    check_can_compile("cpu")


def test_what_is_backed_by_huge_pages_keeps_its_contents() -> None:
    memory = mmap.mmap(-1, 8 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = (ctypes.c_char * len(memory)).from_buffer(memory)
    written = os.urandom(1 << 20) * 8
    memory[:] = written
    address = ctypes.addressof(view)
    if not back_by_huge_pages(address, len(memory)):
        pytest.skip("the system has no MADV_COLLAPSE, or no huge page")
    assert huge_bytes(address) >= 3 * HUGE_PAGE_BYTES
    assert memory[:] == written
    assert not back_by_huge_pages(address, HUGE_PAGE_BYTES // 2)


def huge_bytes(address: int) -> int:
    """Of the mapping that holds this address."""
    maps = Path("/proc/self/smaps").read_text()
    for match in re.finditer(r"^([0-9a-f]+)-([0-9a-f]+) (?:.*\n[A-Z])*.*", maps, re.MULTILINE):
        if int(match[1], 16) <= address < int(match[2], 16):
            found = re.search(r"AnonHugePages: +(\d+) kB", match[0])
            assert found is not None
            return int(found[1]) << 10
    raise AssertionError("no such mapping")
