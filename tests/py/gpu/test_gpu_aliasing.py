"""One chunk behind several addresses: what is written through one is read through all."""

from __future__ import annotations

import pytest
import torch

from flexinfer.vtensor import VTensor, VTensorManager
from helpers.gpu_kit import SPEC, Arena, Kit, with_layout

LAYOUTS = pytest.mark.parametrize("layers_per_plane", [1, SPEC.num_layers])


def recorded(
    kit: Kit, manager: VTensorManager, arena: Arena, num_tokens: int
) -> tuple[list[int], VTensor, torch.Tensor]:
    """A prompt, the vTensor that computed it and recorded it, and its KV."""
    tokens = list(range(num_tokens))
    first = manager.create(tokens)
    first.extend(num_tokens)
    with kit.step(manager):
        values = arena.write(first, 0, num_tokens, kit)
    first.record_prefix(tokens)
    return tokens, first, values


@LAYOUTS
def test_a_prefix_is_read_through_every_request_that_shares_it(
    kit: Kit, layers_per_plane: int
) -> None:
    manager = kit.manager(with_layout(layers_per_plane))
    arena = Arena(manager)
    length = 3 * kit.row_tokens(manager)
    tokens, first, values = recorded(kit, manager, arena, length)
    others = [manager.create(tokens) for _ in range(3)]
    for vtensor in (first, *others):
        assert torch.equal(arena.read(vtensor, 0, length), values)
    assert [vtensor.num_cached_tokens for vtensor in others] == [length] * 3
    assert manager.stats().chunks_copied == 0
    assert manager.stats().resident_bytes == manager.bytes_for(length)


@LAYOUTS
def test_a_write_through_one_mapping_is_read_through_another(
    kit: Kit, layers_per_plane: int
) -> None:
    manager = kit.manager(with_layout(layers_per_plane))
    arena = Arena(manager)
    length = 2 * kit.row_tokens(manager)
    tokens, first, _ = recorded(kit, manager, arena, length)
    second = manager.create(tokens)
    values = arena.write(first, 0, length, kit)  # breaks the rules, to see the aliasing
    assert torch.equal(arena.read(second, 0, length), values)
    values = arena.write(second, 0, length, kit)
    assert torch.equal(arena.read(first, 0, length), values)


@LAYOUTS
def test_copied_prefixes_are_equal_but_not_the_same_memory(kit: Kit, layers_per_plane: int) -> None:
    manager = kit.manager(with_layout(layers_per_plane), alias=False)
    arena = Arena(manager)
    length = 2 * kit.row_tokens(manager)
    tokens, first, values = recorded(kit, manager, arena, length)
    second = manager.create(tokens)
    assert torch.equal(arena.read(second, 0, length), values)
    arena.write(first, 0, length, kit)
    assert torch.equal(arena.read(second, 0, length), values)


@LAYOUTS
def test_the_partial_tail_of_a_match_is_a_copy(kit: Kit, layers_per_plane: int) -> None:
    manager = kit.manager(with_layout(layers_per_plane))
    arena = Arena(manager)
    row = kit.row_tokens(manager)
    tokens, first, values = recorded(kit, manager, arena, 2 * row + row // 2)
    second = manager.create([*tokens, 9_999])
    second.extend(len(tokens) + 1)
    with kit.step(manager):
        own = arena.write(second, len(tokens), len(tokens) + 1, kit)
    assert torch.equal(arena.read(second, 0, len(tokens)), values)
    assert torch.equal(arena.read(second, len(tokens), len(tokens) + 1), own)
    first.extend(len(tokens) + 1)
    with kit.step(manager):
        arena.write(first, len(tokens), len(tokens) + 1, kit)
    assert torch.equal(arena.read(second, len(tokens), len(tokens) + 1), own)


@LAYOUTS
def test_forks_share_until_they_write(kit: Kit, layers_per_plane: int) -> None:
    manager = kit.manager(with_layout(layers_per_plane))
    arena = Arena(manager)
    length = 2 * kit.row_tokens(manager) + 1
    parent = manager.create()
    parent.extend(length)
    with kit.step(manager):
        values = arena.write(parent, 0, length, kit)
    children = [parent.fork() for _ in range(3)]
    tails = []
    for vtensor in (parent, *children):
        vtensor.extend(length + 1)  # copy on write, while the step above may still run
        with kit.step(manager):
            tails.append(arena.write(vtensor, length, length + 1, kit))
    for vtensor, tail in zip((parent, *children), tails, strict=True):
        assert torch.equal(arena.read(vtensor, 0, length), values)
        assert torch.equal(arena.read(vtensor, length, length + 1), tail)
    rows = 3 + len(children)  # three of the parent, and a tail for each child
    assert manager.stats().resident_bytes <= rows * manager.chunk_bytes * manager.spec.num_planes
