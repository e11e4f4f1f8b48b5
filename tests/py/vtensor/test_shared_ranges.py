"""``VTensorManager.shared_ranges``: who holds which tokens in the same chunks.

Random histories are in test_vtensor_stateful.py, which compares after every operation.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from flexinfer.errors import ReleasedError
from flexinfer.vtensor import KVSpec, VTensor, VTensorManager
from helpers.sharing_oracle import check_shared_ranges

CHUNK = 4096  # 1 KiB a token: four tokens per chunk
SPEC = KVSpec(num_layers=2, num_kv_heads=2, head_dim=32, max_seq_len=64)


def open_manager(spec: KVSpec = SPEC, **options: bool) -> VTensorManager:
    return VTensorManager(
        spec,
        max_requests=6,
        memory_budget=200 * CHUNK,
        chunk_bytes=CHUNK,
        swap_space=200 * CHUNK,
        from_dlpack=np.from_dlpack,
        **options,
    )


@pytest.fixture
def manager() -> Iterator[VTensorManager]:
    with open_manager() as manager:
        yield manager
        manager.check_integrity()


def computed(manager: VTensorManager, tokens: list[int]) -> VTensor:
    """A vTensor whose KV is as long as ``tokens``."""
    vtensor = manager.create(tokens)
    vtensor.extend(len(tokens))
    return vtensor


def test_requests_with_a_recorded_prefix_share_its_whole_chunks(manager: VTensorManager) -> None:
    first = computed(manager, list(range(10)))
    first.record_prefix(list(range(10)))
    second = computed(manager, [*range(10), 50])
    third = second.fork()
    third.extend(12)
    batch = [third, first, second]
    assert check_shared_ranges(manager, batch, [11, 10, 10]) == [(third.slot, 0, 8, (0, 1, 2))]


def test_forks_of_forks_give_nested_ranges(manager: VTensorManager) -> None:
    root = computed(manager, list(range(8)))
    left, right = root.fork(), root.fork()
    left.extend(17)
    leaf = left.fork()
    leaf.extend(18)
    ranges = check_shared_ranges(manager, [right, left, leaf], [8, 16, 17])
    assert ranges == [(right.slot, 0, 8, (0, 1, 2)), (left.slot, 8, 16, (1, 2))]


def test_only_tokens_before_each_first_new_one_count(manager: VTensorManager) -> None:
    root = computed(manager, list(range(16)))
    fork = root.fork()
    assert check_shared_ranges(manager, [root, fork], [16, 7]) == [(root.slot, 0, 4, (0, 1))]


@pytest.mark.parametrize("layers_per_plane", [1, 2])
def test_prefixes_computed_side_by_side_are_shared_once_recorded(layers_per_plane: int) -> None:
    spec = KVSpec(2, 2, 64, "float32", 64, layers_per_plane=layers_per_plane)
    tokens = list(range(30))
    with open_manager(spec) as manager:
        batch = [computed(manager, tokens), computed(manager, tokens)]
        assert check_shared_ranges(manager, batch, [30, 30]) == []
        for vtensor in batch:
            vtensor.record_prefix(tokens)
        whole = 30 * spec.plane_token_bytes // CHUNK * CHUNK // spec.plane_token_bytes
        ranges = check_shared_ranges(manager, batch, [30, 30])
        assert ranges == [(batch[0].slot, 0, whole, (0, 1))]


def test_without_aliasing_nothing_is_shared() -> None:
    with open_manager(alias=False) as manager:
        root = computed(manager, list(range(16)))
        assert check_shared_ranges(manager, [root, root.fork()], [16, 16]) == []


def test_a_swap_keeps_what_others_still_hold(manager: VTensorManager) -> None:
    tokens = list(range(16))
    root = computed(manager, tokens)
    root.record_prefix(tokens[:8])
    fork = root.fork()
    assert fork.try_swap_out()
    with pytest.raises(ValueError, match="swapped out"):
        manager.shared_ranges([root, fork], [16, 16])
    assert fork.try_swap_in(tokens)
    assert check_shared_ranges(manager, [root, fork], [16, 16]) == [(root.slot, 0, 16, (0, 1))]


def test_misuse_is_refused(manager: VTensorManager) -> None:
    vtensor = computed(manager, list(range(5)))
    with pytest.raises(ValueError, match="has 5 tokens, not 6"):
        manager.shared_ranges([vtensor], [6])
    with pytest.raises(ValueError, match="1 vTensors but 2 lengths"):
        manager.shared_ranges([vtensor], [1, 2])
    with pytest.raises(ValueError, match="integers"):
        manager.shared_ranges([vtensor], [-1])
    vtensor.release()
    with pytest.raises(ReleasedError):
        manager.shared_ranges([vtensor], [1])
