"""What tensor views on a CUDA device say of themselves: every field of the DLPack exchange.

On the stand-in driver, so a GPU is not needed; numbers are those of the array API standard and of
DLPack 1.1.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from flexinfer.vtensor import KVSpec, VTensor, VTensorManager
from helpers import dlpack
from helpers.standin_cuda import StandinCuda

CUDA = 2  # kDLCUDA
CHUNK = 2 << 20
MAX_SEQ_LEN = 4096
STREAMS = [None, -1, 1, 2, 0x7F0000001000]  # no sync, none, legacy and per-thread default, a handle


def open_manager(device: str = "cuda", dtype: str = "float16", **spec: Any) -> VTensorManager:
    """Bare DLPack objects come out of its views."""
    shape = KVSpec(4, 2, 64, dtype, MAX_SEQ_LEN, **spec)
    return VTensorManager(
        shape,
        device,
        max_requests=3,
        memory_budget=64 * CHUNK,
        from_dlpack=lambda exported: exported,
    )


def extended(manager: VTensorManager, num_tokens: int = 100) -> VTensor:
    vtensor = manager.create()
    vtensor.extend(num_tokens)
    return vtensor


@pytest.mark.parametrize("index", [0, 1])
def test_the_device_is_cuda_and_its_index(standin: StandinCuda, index: int) -> None:
    with open_manager(f"cuda:{index}") as manager:
        for exported in (extended(manager).k(0), manager.v(3)):
            assert exported.__dlpack_device__() == (CUDA, index)
            assert dlpack.read(exported.__dlpack__()).device == (CUDA, index)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("float32", (2, 32, 1)), ("float16", (2, 16, 1)), ("bfloat16", (4, 16, 1))],
)
def test_the_dtype_is_told_by_code_bits_and_lanes(
    standin: StandinCuda, dtype: str, expected: tuple[int, int, int]
) -> None:
    with open_manager(dtype=dtype) as manager:
        assert dlpack.read(extended(manager).k(0).__dlpack__()).dtype == expected


@pytest.mark.parametrize(
    ("layers_per_plane", "token_stride"),
    [(1, 2 * 64), (2, 2 * 2 * 2 * 64), (4, 4 * 2 * 2 * 64)],  # dense: K alone; else K and V of each
)
def test_shape_and_strides_count_elements_of_the_layout(
    standin: StandinCuda, layers_per_plane: int, token_stride: int
) -> None:
    with open_manager(layers_per_plane=layers_per_plane) as manager:
        view = dlpack.read(extended(manager, 100).v(2).__dlpack__())
        assert view.shape == (100, 2, 64)
        assert view.strides == (token_stride, 64, 1)
        arena = dlpack.read(manager.v(2).__dlpack__())
        assert arena.shape == (3, MAX_SEQ_LEN, 2, 64)
        assert arena.strides[1:] == (token_stride, 64, 1)
        assert arena.strides[0] >= MAX_SEQ_LEN * token_stride
        assert arena.strides[0] * 2 % CHUNK == 0, "slots start at chunks"


def test_addresses_are_the_slots_with_no_byte_offset(standin: StandinCuda) -> None:
    """PyTorch and others add byte_offset, some libraries forget it: it is always 0."""
    with open_manager(layers_per_plane=4) as manager:
        vtensors = [extended(manager), extended(manager)]
        arena = dlpack.read(manager.k(1).__dlpack__())
        views = [dlpack.read(vtensor.k(1).__dlpack__()) for vtensor in vtensors]
        assert arena.byte_offset == views[0].byte_offset == views[1].byte_offset == 0
        for vtensor, view in zip(vtensors, views, strict=True):
            assert view.data == arena.data + vtensor.slot * arena.strides[0] * 2
        assert dlpack.read(vtensors[0].k(0).__dlpack__()).data % CHUNK == 0


def test_an_empty_view_has_no_tokens(standin: StandinCuda) -> None:
    with open_manager() as manager:
        assert dlpack.read(manager.create().k(0).__dlpack__()).shape == (0, 2, 64)


@pytest.mark.parametrize(
    ("max_version", "name"),
    [
        (None, "dltensor"),
        ((0, 8), "dltensor"),
        ((1, 0), "dltensor_versioned"),
        ((1, 1), "dltensor_versioned"),
        ((2, 0), "dltensor_versioned"),
    ],
)
def test_the_capsule_has_the_layout_that_the_consumer_knows(
    standin: StandinCuda, max_version: tuple[int, int] | None, name: str
) -> None:
    with open_manager() as manager:
        capsule = extended(manager).k(0).__dlpack__(max_version=max_version)
        assert dlpack.name_of(capsule) == name
        fields = dlpack.read(capsule)
        assert fields.version is None or fields.version[0] == 1
        assert fields.shape == (100, 2, 64)


def test_views_are_writable_and_no_copies(standin: StandinCuda) -> None:
    with open_manager() as manager:
        flags = dlpack.read(extended(manager).k(0).__dlpack__(max_version=(1, 1))).flags
        assert flags & dlpack.READ_ONLY == 0
        assert flags == 0, "neither read-only nor copied"


@pytest.mark.parametrize("stream", STREAMS)
def test_every_stream_is_served_without_driver_work(
    standin: StandinCuda, stream: int | None
) -> None:
    """The manager's own copies are over when its calls return, and who writes the KV orders that:
    there is nothing that the consumer's stream would have to wait for."""
    with open_manager() as manager:
        exported = extended(manager).k(0)
        functions = ("cuStreamSynchronize", "cuEventRecord")
        before = [standin.calls(function) for function in functions]
        fields = dlpack.read(exported.__dlpack__(stream=stream, max_version=(1, 1)))
        assert fields.shape == (100, 2, 64)
        assert [standin.calls(function) for function in functions] == before


def test_a_consumer_on_another_device_is_refused(standin: StandinCuda) -> None:
    with open_manager() as manager:
        exported = extended(manager).k(0)
        assert dlpack.read(exported.__dlpack__(dl_device=(CUDA, 0))).device == (CUDA, 0)
        with pytest.raises(BufferError, match="dl_device"):
            exported.__dlpack__(dl_device=(CUDA, 1))
        with pytest.raises(BufferError, match="dl_device"):
            exported.__dlpack__(dl_device=(1, 0))


def test_a_view_may_be_exchanged_many_times(standin: StandinCuda) -> None:
    with open_manager() as manager:
        exported = extended(manager).k(0)
        addresses = {dlpack.read(exported.__dlpack__()).data for _ in range(5)}
        assert len(addresses) == 1


def test_capsules_keep_their_memory_until_the_last_is_gone(standin: StandinCuda) -> None:
    with open_manager() as manager:
        vtensor = extended(manager)
        first = vtensor.k(0)
        capsules = [first.__dlpack__(), first.__dlpack__(max_version=(1, 1))]
        del first
        vtensor.release()
        held_bytes = manager.stats().held_bytes
        assert held_bytes > 0
        capsules.pop()
        assert manager.stats().held_bytes == held_bytes
        capsules.pop()
        assert manager.stats().held_bytes == 0


def test_a_capsule_keeps_a_manager_that_its_owner_dropped(standin: StandinCuda) -> None:
    manager = open_manager()
    dropped = weakref.ref(manager)
    capsule = extended(manager).k(0).__dlpack__()
    del manager
    gc.collect()
    assert dropped() is None
    array = dlpack.read(capsule)
    assert standin.live("bytes") > 0
    del capsule, array
    gc.collect()
    assert standin.live() == 0


def test_a_torch_without_cuda_refuses_instead_of_misreading(standin: StandinCuda) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this torch would take the stand-in's addresses for a GPU's")
    with (
        open_manager() as manager,
        pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"),
    ):
        torch.from_dlpack(extended(manager).k(0))
