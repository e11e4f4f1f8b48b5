"""Running out of memory and going on; several owners of one device's memory."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flexinfer.errors import OutOfMemoryError
from flexinfer.vtensor import VTensor
from helpers.gpu_kit import SPEC, Arena, Kit

TESTS = Path(__file__).parents[1]
GIB = 1 << 30
ALLOC_CONF = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # new and old name


def test_the_budget_ends_cleanly_and_memory_given_back_serves_again(kit: Kit) -> None:
    rows = 4
    manager = kit.manager(chunks=rows)
    arena = Arena(manager)
    row = kit.row_tokens(manager)
    first, second = manager.create(), manager.create()
    first.extend(3 * row)
    values = arena.write(first, 0, 3 * row, kit)
    with pytest.raises(OutOfMemoryError) as raised:
        second.extend(2 * row)
    assert raised.value.budget_bytes == rows * manager.chunk_bytes
    assert second.mapped_tokens == 0
    assert torch.equal(arena.read(first, 0, 3 * row), values)
    kit.synchronize()
    first.release()
    second.extend(4 * row)
    with kit.step(manager):
        assert not arena.read(second, 0, 4 * row).any()


ON_A_FULL_DEVICE = ["standin", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.alone])]


@pytest.mark.parametrize("kit", ON_A_FULL_DEVICE, indirect=True)
def test_a_full_device_ends_cleanly_and_memory_given_back_serves_again(kit: Kit) -> None:
    """Others take all but a little; a budget beyond that is not there, and nobody is harmed."""
    left, chunk_bytes = (2 * GIB, 32 << 20) if kit.is_cuda else (24 << 20, 1 << 20)
    free = kit.free_bytes()
    give_back = kit.occupy(free - left)
    manager = kit.manager(
        dataclasses.replace(SPEC, max_seq_len=1 << 20), memory_budget=free, chunk_bytes=chunk_bytes
    )
    arena = Arena(manager)
    row = kit.row_tokens(manager)
    vtensor = manager.create()
    vtensor.extend(2 * row)
    values = arena.write(vtensor, 0, 2 * row, kit)
    # What the comparison needs (memory, kernels that are loaded late) is there before all is full.
    seen = torch.empty_like(values)
    assert is_same(arena, vtensor, values, seen)
    rows = 2
    with pytest.raises(OutOfMemoryError, match="cuMemCreate on CUDA device 0"):  # noqa: PT012
        while rows * chunk_bytes < free:
            vtensor.extend((rows + 1) * row)
            rows += 1
    assert vtensor.mapped_tokens == rows * row
    assert is_same(arena, vtensor, values, seen)
    manager.check_integrity()
    give_back()
    vtensor.extend((rows + 8) * row)  # what others gave back serves the KV cache
    kit.synchronize()
    vtensor.release()
    manager.trim()
    del values, seen
    kit.occupy(free - left)()


def is_same(arena: Arena, vtensor: VTensor, values: torch.Tensor, seen: torch.Tensor) -> bool:
    """Whether the vTensor's first tokens show `values`; `seen` is overwritten, nothing is made."""
    for plane, part in zip(arena.planes, seen, strict=True):
        part.copy_(plane[vtensor.slot, : part.shape[0]])
    return float(seen.sub_(values).abs_().max()) == 0.0


def test_two_managers_do_not_touch_each_other(kit: Kit) -> None:
    half = dataclasses.replace(SPEC, dtype="bfloat16", num_layers=3, layers_per_plane=1)
    managers = [kit.manager(), kit.manager(half)]
    arenas = [Arena(manager) for manager in managers]
    lengths = [2 * kit.row_tokens(manager) + 3 for manager in managers]
    vtensors = [manager.create() for manager in managers]
    values = []
    for vtensor, arena, length in zip(vtensors, arenas, lengths, strict=True):
        vtensor.extend(length)
        values.append(arena.write(vtensor, 0, length, kit))
    for vtensor, arena, length, expected in zip(vtensors, arenas, lengths, values, strict=True):
        assert torch.equal(arena.read(vtensor, 0, length), expected)
    kit.synchronize()
    del arenas[0]
    managers[0].close()
    assert torch.equal(arenas[0].read(vtensors[1], 0, lengths[1]), values[1])


def test_torch_allocates_and_frees_beside_the_pool(kit: Kit) -> None:
    manager = kit.manager()
    arena = Arena(manager)
    row = kit.row_tokens(manager)
    vtensor = manager.create()
    values, tensors = [], []
    for idx in range(8):
        vtensor.extend((idx + 1) * row)
        values.append(arena.write(vtensor, idx * row, (idx + 1) * row, kit))
        tensors.append(torch.full((1 << 20,), float(idx), device=kit.device))
        if idx % 3 == 2:
            del tensors[0]
            if kit.is_cuda:
                torch.cuda.empty_cache()
    assert torch.equal(arena.read(vtensor, 0, 8 * row), torch.cat(values, dim=1))
    assert all(bool((tensor == tensor[0]).all()) for tensor in tensors)


def test_torchs_expandable_segments_stand_beside_the_pool(device: str) -> None:
    """They are made of the same driver calls as ours; in a process of its own, as they are chosen
    when torch starts."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from helpers.gpu_kit import Kit; from gpu import test_gpu_memory as t\n"
        "kit = Kit(sys.argv[2]); t.test_torch_allocates_and_frees_beside_the_pool(kit); kit.close()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(TESTS), device],
        env={**os.environ, **dict.fromkeys(ALLOC_CONF, "expandable_segments:True")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_reading_beyond_what_is_mapped_faults(device: str) -> None:
    """`unmapped="guard"`: a stray read ends the process (CPU) or its context (CUDA), and never
    shows another request's data."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from helpers.gpu_kit import Arena, Kit\n"
        "kit = Kit(sys.argv[2]); manager = kit.manager(); arena = Arena(manager)\n"
        "vtensor = manager.create(); vtensor.extend(1)\n"
        "row = kit.row_tokens(manager)\n"
        "print('mapped', bool(arena.read(vtensor, 0, row).any()), flush=True)\n"
        "print('beyond', bool(arena.read(vtensor, row, 2 * row).any()), flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(TESTS), device],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "mapped False\n", done.stderr
    assert done.returncode != 0
