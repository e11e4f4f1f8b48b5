"""Memory under running kernels: nothing that a step may read is unmapped, remapped or reused.

Each body issues kernels behind a stream that is kept busy, changes memory at once, and looks at
what the kernels saw. A mistake is wrong data, or an illegal address that ends the CUDA context.
"""

from __future__ import annotations

import torch

from helpers.gpu_kit import Arena, Kit

BUSY_MS = 50.0


def test_a_released_vtensor_is_readable_by_the_step_that_runs(kit: Kit) -> None:
    manager = kit.manager(park=False, min_free_bytes=0)
    arena = Arena(manager)
    length = 4 * kit.row_tokens(manager)
    vtensor = manager.create()
    vtensor.extend(length)
    values = arena.write(vtensor, 0, length, kit)
    with kit.step(manager):
        kit.busy(BUSY_MS)
        seen = arena.read(vtensor, 0, length)
    vtensor.release()
    manager.trim()
    assert torch.equal(seen, values)
    kit.synchronize()
    manager.trim()
    assert manager.resident_bytes == 0


def test_chunks_are_not_handed_on_while_a_step_reads_them(kit: Kit) -> None:
    rows = 3
    manager = kit.manager(chunks=rows, park=False)
    arena = Arena(manager)
    length = rows * kit.row_tokens(manager)
    first = manager.create()
    first.extend(length)
    values = arena.write(first, 0, length, kit)
    with kit.step(manager):
        kit.busy(BUSY_MS)
        seen = arena.read(first, 0, length)
    first.release()
    second = manager.create()
    second.extend(length)  # the whole budget: has to wait for the step
    with kit.step(manager):
        fresh = arena.read(second, 0, length)
        arena.write(second, 0, length, kit)
    assert torch.equal(seen, values)
    assert not fresh.any(), "a chunk that changed hands was not scrubbed"


def test_a_parked_slot_is_adopted_in_order(kit: Kit) -> None:
    manager = kit.manager(chunks=2, max_requests=1)
    arena = Arena(manager)
    length = 2 * kit.row_tokens(manager)
    seen, written = [], []
    for _ in range(6):  # the same addresses and chunks again and again, never a wait of ours
        vtensor = manager.create()
        vtensor.extend(length)
        with kit.step(manager):
            kit.busy(BUSY_MS / 10)
            written.append(arena.write(vtensor, 0, length, kit))
            seen.append(arena.read(vtensor, 0, length))
        vtensor.release()
    for got, expected in zip(seen, written, strict=True):
        assert torch.equal(got, expected)


def test_extending_leaves_what_a_step_reads_alone(kit: Kit) -> None:
    manager = kit.manager()
    arena = Arena(manager)
    row = kit.row_tokens(manager)
    vtensor = manager.create()
    seen, written = [], []
    for idx in range(8):  # a step each; the next row is mapped while the last one is read
        vtensor.extend((idx + 1) * row)
        manager.pre_extend([vtensor], [(idx + 2) * row])
        with kit.step(manager):
            kit.busy(BUSY_MS / 10)
            written.append(arena.write(vtensor, idx * row, (idx + 1) * row, kit))
            seen.append(arena.read(vtensor, 0, (idx + 1) * row))
    everything = torch.cat(written, dim=1)
    for idx, got in enumerate(seen):
        assert torch.equal(got, everything[:, : (idx + 1) * row])


def test_eviction_waits_for_the_step(kit: Kit) -> None:
    rows = 3
    manager = kit.manager(chunks=rows)
    arena = Arena(manager)
    length = rows * kit.row_tokens(manager)
    tokens = list(range(length))
    first = manager.create(tokens)
    first.extend(length)
    values = arena.write(first, 0, length, kit)
    kit.synchronize()
    first.record_prefix(tokens)
    first.release()
    reader = manager.create(tokens)
    with kit.step(manager):
        kit.busy(BUSY_MS)
        seen = arena.read(reader, 0, length)
    reader.release()
    other = manager.create()
    other.extend(length)  # evicts the recorded prefix
    with kit.step(manager):
        arena.write(other, 0, length, kit)
    assert torch.equal(seen, values)
    assert manager.match_prefix(tokens) < length


def test_sleep_and_wake_keep_contents_behind_the_same_addresses(kit: Kit) -> None:
    manager = kit.manager()
    arena = Arena(manager)
    length = 3 * kit.row_tokens(manager)
    vtensor = manager.create()
    vtensor.extend(length)
    with kit.step(manager):
        kit.busy(BUSY_MS)
        values = arena.write(vtensor, 0, length, kit)
    returned = manager.sleep()
    assert returned > 0 or kit.device == "cpu"  # there it is kept in the same memory
    assert manager.resident_bytes == 0
    manager.wake()
    assert torch.equal(arena.read(vtensor, 0, length), values)


def test_swapped_contents_come_back(kit: Kit) -> None:
    manager = kit.manager(swap_space="64MiB")
    arena = Arena(manager)
    length = 2 * kit.row_tokens(manager)
    vtensor = manager.create()
    vtensor.extend(length)
    with kit.step(manager):
        kit.busy(BUSY_MS)
        values = arena.write(vtensor, 0, length, kit)
    assert vtensor.try_swap_out()
    assert vtensor.try_swap_in()
    assert torch.equal(arena.read(vtensor, 0, length), values)
