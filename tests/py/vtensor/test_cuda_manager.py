"""``device="cuda"`` on the stand-in driver: several devices, steps, and what each refusal says."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flexinfer.errors import DriverError, OutOfMemoryError
from flexinfer.replay.reader import TraceReader
from flexinfer.replay.replay import replay
from flexinfer.vtensor import KVSpec, VTensor, VTensorManager
from helpers import dlpack
from helpers.standin_cuda import StandinCuda

MIB = 1 << 20
CHUNK = 2 * MIB
VMM_SUPPORTED = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
UNKNOWN = 999  # CUDA_ERROR_UNKNOWN
SPEC = KVSpec(num_layers=2, num_kv_heads=4, head_dim=128, max_seq_len=1024)  # 8 KiB a token
PROMPT = list(range(300))  # one whole chunk of 256 tokens, and a part of the next


def open_manager(device: str = "cuda", **options: Any) -> VTensorManager:
    defaults: dict[str, Any] = {"max_requests": 4, "memory_budget": 16 * CHUNK}
    return VTensorManager(SPEC, device, **{**defaults, "from_dlpack": dlpack.host_array, **options})


def filled(manager: VTensorManager, value: float = 1) -> VTensor:
    vtensor = manager.create(PROMPT)
    vtensor.extend(len(PROMPT))
    vtensor.k(0)[vtensor.num_cached_tokens :] = value
    return vtensor


def launch(standin: StandinCuda, vtensor: VTensor) -> int:
    """A kernel that reads all chunks of ``vtensor``, whose layers lie side by side."""
    return standin.begin_kernel(vtensor.k(0).ctypes.data, vtensor.info().mapped_bytes)


# ------------------------------------------------------------------------------------------ devices


def test_two_devices_hold_a_manager_each(standin: StandinCuda) -> None:
    with open_manager("cuda:0") as first, open_manager("cuda:1") as second:
        vtensors = [filled(first, 3), filled(second, 4)]
        assert (vtensors[0].k(0) == 3).all()
        assert (vtensors[1].k(0) == 4).all()
        vtensors[0].record_prefix(PROMPT)
        assert (first.match_prefix(PROMPT), second.match_prefix(PROMPT)) == (300, 0)
        first.close()
        assert (vtensors[1].k(0) == 4).all()


def test_a_device_without_memory_does_not_stop_the_other(standin: StandinCuda) -> None:
    standin.set_capacity(4 * CHUNK)
    with open_manager("cuda:0") as first, open_manager("cuda:1") as second:
        kept = [filled(first), filled(first)]
        with pytest.raises(OutOfMemoryError, match="cuMemCreate"):
            filled(first)
        assert filled(second).num_tokens == kept[0].num_tokens == 300
        first.check_integrity()


def test_a_closed_manager_leaves_nothing_in_the_driver(standin: StandinCuda) -> None:
    manager = open_manager()
    filled(manager)
    assert standin.live("bytes") == 2 * CHUNK
    manager.close()
    assert standin.live("bytes") == 0
    del manager
    gc.collect()
    assert standin.live() == 0


def test_the_default_chunk_is_2_mib(standin: StandinCuda) -> None:
    with open_manager() as manager:
        assert manager.chunk_bytes == CHUNK


# ----------------------------------------------------------------------------------------- refusals


def test_no_driver_names_the_library_and_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FLEXINFER_LIBCUDA", str(tmp_path / "libcuda.so.1"))
    with pytest.raises(DriverError, match=r"no NVIDIA driver here.*FLEXINFER_LIBCUDA") as caught:
        open_manager()
    assert caught.value.call == "dlopen"


@pytest.mark.parametrize(
    ("prepare", "error", "message"),
    [
        (lambda s: s.set_devices(0), DriverError, "no CUDA device can be used.*host driver"),
        (lambda s: s.set_attribute(VMM_SUPPORTED, 0), DriverError, "needs a driver with CUDA 10.2"),
        (lambda s: s.fail("cuMemAddressReserve", 1, UNKNOWN), DriverError, "CUDA_ERROR_UNKNOWN"),
    ],
    ids=["no device", "driver too old", "no addresses"],
)
def test_a_driver_that_cannot_serve_says_why(
    standin: StandinCuda,
    prepare: Callable[[StandinCuda], None],
    error: type[Exception],
    message: str,
) -> None:
    standin.forget_init()
    prepare(standin)
    with pytest.raises(error, match=message):
        open_manager()


@pytest.mark.parametrize(
    ("device", "options", "message"),
    [
        ("cuda:2", {}, r"device index 2 is out of range: this process sees 2 device\(s\)"),
        ("cuda:7", {}, "device index 7 is out of range"),
        ("cuda:-1", {}, "device is 'cpu', 'cuda', 'cuda:N' or 'sim'"),
        (
            "cuda",
            {"chunk_bytes": "64KiB"},
            "65536 is not a positive multiple .*granularity 2097152",
        ),
        ("cuda", {"chunk_bytes": "3MiB"}, "3145728 is not a positive multiple"),
        ("cuda", {"memory_budget": MIB}, "less than one chunk in each plane"),
        ("cuda", {"unmapped": "zero"}, "unmapped='zero' is not available.*use 'guard'"),
    ],
)
def test_settings_that_make_no_sense_are_value_errors(
    standin: StandinCuda, device: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        open_manager(device, **options)


# -------------------------------------------------------------------------------------------- steps


def test_what_a_kernel_reads_stays_until_it_is_over(standin: StandinCuda) -> None:
    with open_manager(park=False) as manager:
        vtensor = filled(manager, 5)
        view = vtensor.k(0).copy()
        manager.begin_step()
        kernel = launch(standin, vtensor)
        manager.end_step()
        vtensor.release()
        manager.trim()
        assert standin.live("bytes") == 2 * CHUNK
        standin.end_kernel(kernel)
        assert manager.trim() == 2 * CHUNK
        assert (view == 5).all()


def test_an_open_step_refuses_what_it_cannot_wait_for(standin: StandinCuda) -> None:
    with open_manager() as manager:
        vtensor = filled(manager)
        manager.begin_step()
        with pytest.raises(ValueError, match=r"call end_step\(\) after its kernels"):
            manager.sleep()
        manager.end_step()
        manager.sleep()
        manager.wake()
        assert (vtensor.k(0) == 1).all()


@pytest.mark.parametrize("what", ["view", "arena", "end of a view"])
def test_python_goes_on_while_a_view_waits_for_the_manager(standin: StandinCuda, what: str) -> None:
    """Another thread holds the manager for as long as a kernel runs. Were the GIL held by who waits
    for the manager, nobody could end the kernel."""
    standin.set_sync_timeout_ms(20_000)
    with open_manager() as manager:
        vtensor = filled(manager)
        views = [vtensor.k(0)]
        use_the_manager: dict[str, Callable[[], object]] = {
            "view": lambda: vtensor.k(1),
            "arena": lambda: manager.v(0),
            "end of a view": views.clear,
        }
        child = vtensor.fork()
        manager.begin_step()
        kernel = launch(standin, vtensor)
        manager.end_step()
        holder = threading.Thread(target=child.extend, args=[301])  # copies: waits for the kernel
        holder.start()
        while standin.calls("cuEventSynchronize") == 0:
            time.sleep(0.001)
        device = threading.Timer(0.05, standin.end_kernel, [kernel])
        device.start()
        use_the_manager[what]()
        device.join()
        holder.join()
        assert child.num_tokens == 301


# ------------------------------------------------------------------------------------------ tracing


def record(standin: StandinCuda, path: Path) -> int:
    """Three steps with a release under kernels in flight; returns created bytes at the peak."""
    with open_manager(max_requests=3) as manager:
        manager.start_trace(path)
        running = filled(manager)
        for value in (2, 3):
            manager.begin_step()
            kernel = launch(standin, running)
            manager.end_step()
            running.record_prefix(PROMPT)
            running.release()
            running = filled(manager, value)
            standin.end_kernel(kernel)
        manager.stop_trace()
        return manager.resident_bytes


def test_steps_stand_in_the_trace_in_order(standin: StandinCuda, tmp_path: Path) -> None:
    record(standin, tmp_path / "steps.trace")
    names = [r["op"] for _, r in TraceReader(tmp_path / "steps.trace") if r["k"] == "op"]
    assert names.count("begin_step") == names.count("end_step") == 2
    assert names.index("begin_step") < names.index("end_step") < names.index("release")


@pytest.mark.parametrize("device", ["sim", "cpu", "cuda"])
def test_a_trace_with_steps_is_replayed_on_any_device(
    standin: StandinCuda, tmp_path: Path, device: str
) -> None:
    peak = record(standin, tmp_path / "steps.trace")
    report = replay(tmp_path / "steps.trace", device)
    assert report.replayed.peak_resident_bytes == peak
    assert report.operations["begin_step"] == 2
    assert report.num_skipped == 0


def test_a_trace_that_ends_inside_a_step_is_replayed(standin: StandinCuda, tmp_path: Path) -> None:
    with open_manager() as manager:
        manager.start_trace(tmp_path / "open.trace")
        filled(manager)
        manager.begin_step()
    assert replay(tmp_path / "open.trace", "sim").operations["begin_step"] == 1
