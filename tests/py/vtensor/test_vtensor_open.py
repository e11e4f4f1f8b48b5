"""Sizes, specs and settings of a manager: what they mean, and what each misuse says."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from flexinfer.vtensor import VTensorManager, available_memory_bytes, parse_bytes
from helpers import device_param as kv_device
from helpers.manager_kit import CHUNK, open_manager, spec_of

pytestmark = pytest.mark.usefixtures("kv_device")


# KVSpec, sizes.


@pytest.mark.parametrize(
    ("text", "size"),
    [("64KiB", 65536), ("1.5GiB", 3 << 29), ("512M", 512 << 20), ("7", 7), (7, 7), (" 2 kb", 2048)],
)
def test_sizes_are_numbers_or_text(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "many", "1.2.3K", "-5", "9" * 400, True])
def test_text_that_is_no_size_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="memory_budget"):
        parse_bytes(text, "memory_budget")


def test_the_machine_has_memory() -> None:
    assert available_memory_bytes() > 1 << 20


@pytest.mark.parametrize(
    ("layers_per_plane", "num_planes", "token_bytes"),
    [(1, 8, 256), (2, 2, 1024), (4, 1, 2048), (None, 1, 2048)],
)
def test_layouts_have_planes_and_token_sizes(
    layers_per_plane: int | None, num_planes: int, token_bytes: int
) -> None:
    spec = spec_of(num_layers=4, layers_per_plane=layers_per_plane)
    assert (spec.num_planes, spec.plane_token_bytes) == (num_planes, token_bytes)
    assert spec.bytes_per_token == num_planes * token_bytes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers"),
        ({"head_dim": -1}, "head_dim"),
        ({"num_kv_heads": 1.5}, "num_kv_heads"),
        ({"max_seq_len": 0}, "max_seq_len"),
        ({"num_layers": 4, "layers_per_plane": 3}, "layers_per_plane 3 does not divide"),
        ({"dtype": "int8"}, "dtype 'int8' is not supported"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec_of(**changes)


# Opening a manager.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_budget": CHUNK - 1}, "less than one chunk"),
        ({"memory_budget": -1}, "memory_budget is a number of bytes from 0 to"),
        ({"chunk_bytes": 5000}, "5000 is not a positive multiple of the driver's granularity 4096"),
        ({"chunk_bytes": 0}, "chunk_bytes must be positive"),
        ({"max_requests": 0}, "max_requests"),
        ({"device": "tpu"}, "device"),
        ({"scrub": "sometimes"}, "scrub is one of 'owner', 'tenant', 'off'"),
        ({"unmapped": "random"}, "unmapped is one of"),
    ],
)
def test_a_manager_that_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_manager(**options)


def test_the_budget_holds_a_chunk_in_each_plane() -> None:
    with pytest.raises(ValueError, match="4 x 4096 bytes"):
        open_manager(spec_of(layers_per_plane=1), memory_budget=3 * CHUNK)


def test_a_manager_needs_no_sizes() -> None:
    with VTensorManager(spec_of(), max_requests=2) as manager:
        assert 4096 <= manager.chunk_bytes <= 2 << 20
        assert 0 < manager.memory_budget < available_memory_bytes()


def test_the_sim_device_needs_no_memory() -> None:
    big = spec_of(num_layers=32, num_kv_heads=8, head_dim=128, max_seq_len=32768)
    with VTensorManager(big, "sim", max_requests=8, memory_budget="80GiB") as manager:
        manager.create(range(32768)).extend(32768)
        assert manager.stats().resident_bytes == 32768 * big.bytes_per_token


# Without torch.


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )


@kv_device.cpu_only
def test_the_import_pulls_in_neither_torch_nor_numpy() -> None:
    code = "import sys, flexinfer.vtensor; print({'torch', 'numpy'} & set(sys.modules))"
    assert run_python(code).stdout.strip() == "set()"


@kv_device.cpu_only
def test_it_works_where_torch_is_not_installed() -> None:
    code = """
import sys
sys.modules["torch"] = None
from flexinfer.vtensor import KVSpec, VTensorManager
with VTensorManager(KVSpec(2, 2, 32, max_seq_len=64), memory_budget="1MiB") as manager:
    vtensor = manager.create([1, 2, 3])
    vtensor.extend(3)
    array = vtensor.k(0)
    assert hasattr(array, "__dlpack__"), type(array)
    import numpy
    numpy.from_dlpack(array)[:] = 2
    assert (numpy.from_dlpack(vtensor.k(0)) == 2).all()
print("good")
"""
    result = run_python(code)
    assert result.stdout.strip() == "good", result.stderr
