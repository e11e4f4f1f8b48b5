"""KV that is exported by one manager and adopted by another: the same memory, and no copy of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flexinfer import _vtensor, _vtensor_testing
from flexinfer.errors import DriverError, HandoverError, OutOfMemoryError
from flexinfer.replay.replay import replay
from flexinfer.vtensor import KVGroup, KVSpec, Parcel, VTensor, VTensorManager
from helpers import device_param as kv_device
from helpers.open_files import open_files

pytestmark = pytest.mark.usefixtures("kv_device")

CHUNK = 4096
SPEC = KVSpec(num_layers=2, num_kv_heads=2, head_dim=32, max_seq_len=64)  # 4 tokens a chunk
TOKENS = list(range(10))  # two whole chunks and a half


class FaultyManager(VTensorManager):
    """A manager whose driver fails on demand."""

    def _open(
        self, driver: _vtensor.DriverConfig, options: _vtensor.ManagerOptions
    ) -> _vtensor.Manager:
        self.faults = _vtensor_testing.inject_faults(driver)
        return super()._open(driver, options)


def open_manager(spec: KVSpec = SPEC, **options: Any) -> FaultyManager:
    defaults = {"max_requests": 4, "memory_budget": 64 * CHUNK, "chunk_bytes": CHUNK}
    return FaultyManager(spec, **{**defaults, **kv_device.options(), **options})


@contextmanager
def pair(**options: Any) -> Iterator[tuple[FaultyManager, FaultyManager]]:
    """Two managers that leave no file of a parcel open."""
    with open_manager(**options) as sender, open_manager(**options) as receiver:
        before = open_files()
        yield sender, receiver
        for manager in (sender, receiver):
            manager.faults.fail(0)
            manager.check_integrity()
    assert not open_files() - before


def write(vtensor: VTensor, start: int, end: int, value: float = 1) -> None:
    vtensor.extend(end)
    for layer in range(2):
        vtensor.k(layer)[start:end] = value
        vtensor.v(layer)[start:end] = -value


def values(vtensor: VTensor) -> list[float]:
    """One number per token, where all of a token's are equal."""
    keys = vtensor.k(1)
    assert (keys == keys[:, :1, :1]).all()
    return [float(value) for value in keys[:, 0, 0]]


def calls(manager: VTensorManager, kind: str) -> int:
    made = manager.stats().driver_calls
    return made[kind].calls if kind in made else 0


def exported(sender: VTensorManager, num_tokens: int = 10) -> tuple[VTensor, Parcel]:
    vtensor = sender.create(to_export=True)
    write(vtensor, 0, num_tokens)
    return vtensor, sender.export(vtensor)


def test_the_receiver_has_the_same_memory_and_nothing_is_copied() -> None:
    with pair() as (sender, receiver):
        _, parcel = exported(sender)
        assert (parcel.num_tokens, parcel.num_chunks, parcel.num_copied) == (10, 3, 0)
        adopted = receiver.adopt(parcel)
        assert values(adopted) == [1] * 10
        stats = receiver.stats()
        assert (stats.chunks_received, stats.chunks_copied) == (3, 0)
        assert (sender.stats().chunks_sent, sender.stats().chunks_sent_copied) == (3, 0)
        assert calls(receiver, "copy") == 0
        assert calls(sender, "copy") == 0


def test_the_receiver_goes_on_in_the_last_chunk_without_a_copy() -> None:
    with pair() as (sender, receiver):
        vtensor, parcel = exported(sender)
        adopted = receiver.adopt(parcel)
        write(adopted, 10, 14, 2)
        assert values(adopted) == [1] * 10 + [2] * 4
        assert receiver.stats().chunks_copied == 0
        assert values(vtensor) == [1] * 10


def test_the_sender_goes_on_in_a_copy_of_its_own() -> None:
    with pair() as (sender, receiver):
        vtensor, parcel = exported(sender)
        adopted = receiver.adopt(parcel)
        write(vtensor, 10, 12, 3)
        write(adopted, 10, 12, 2)
        assert sender.stats().chunks_copied == 1
        assert values(vtensor) == [1] * 10 + [3] * 2
        assert values(adopted) == [1] * 10 + [2] * 2


def test_a_second_export_of_the_same_tokens_is_not_to_be_written_on() -> None:
    with pair() as (sender, receiver):
        vtensor, parcel = exported(sender)
        first, second = receiver.adopt(parcel), receiver.adopt(sender.export(vtensor))
        write(first, 10, 12, 2)
        write(second, 10, 12, 3)
        assert receiver.stats().chunks_copied == 1
        assert values(first) == [1] * 10 + [2] * 2
        assert values(second) == [1] * 10 + [3] * 2


def test_a_recorded_prefix_is_adopted_and_the_next_request_hits_it() -> None:
    with pair() as (sender, receiver):
        vtensor = sender.create(TOKENS, to_export=True)
        write(vtensor, 0, 10)
        vtensor.record_prefix(TOKENS)
        vtensor.release()
        parcel = sender.export_prefix(TOKENS)
        assert parcel is not None
        assert parcel.num_copied == 0
        adopted = receiver.adopt(parcel)
        adopted.record_prefix(TOKENS)
        adopted.release()
        request = receiver.create([*TOKENS, 99])
        assert request.num_cached_tokens == 10
        assert values(request) == [1] * 10
        assert sender.export_prefix([77]) is None


def test_memory_of_the_pool_and_of_others_is_copied_and_counted() -> None:
    with pair() as (sender, receiver):
        pooled = sender.create()
        write(pooled, 0, 10)
        parcel = sender.export(pooled)
        assert parcel.num_copied == 3
        assert values(receiver.adopt(parcel)) == [1] * 10
        first = sender.create(TOKENS, to_export=True)
        write(first, 0, 10)
        first.record_prefix(TOKENS)
        second = sender.create([*TOKENS[:8], 50, 51], to_export=True)  # two chunks of the first's
        write(second, 8, 10, 2)
        parcel = sender.export(second)
        assert parcel.num_copied == 2
        assert len(parcel.files) == (2 if kv_device.current() == "cpu" else 3)
        assert values(receiver.adopt(parcel)) == [1] * 8 + [2] * 2


def test_memory_is_given_back_when_both_have_released_it() -> None:
    with pair(park=False) as (sender, receiver):
        vtensor, parcel = exported(sender)
        adopted = receiver.adopt(parcel)
        vtensor.release()
        sender.trim()
        assert sender.stats().resident_bytes == 0
        assert values(adopted) == [1] * 10
        write(adopted, 10, 14, 2)
        adopted.release()
        receiver.trim()
        assert receiver.stats().resident_bytes == 0


def test_what_was_exported_is_never_used_again_for_others() -> None:
    with pair(memory_budget=4 * CHUNK) as (sender, receiver):
        vtensor, parcel = exported(sender)
        adopted = receiver.adopt(parcel)
        vtensor.release()
        write(sender.create(), 0, 16, 7)  # all of the budget
        assert values(adopted) == [1] * 10
        adopted.release()
        write(receiver.create(), 0, 16, 8)


def test_chunks_that_were_adopted_survive_sleep_and_swap() -> None:
    with pair(swap_space=64 * CHUNK) as (sender, receiver):
        vtensor, parcel = exported(sender)
        adopted = receiver.adopt(parcel)
        assert adopted.try_swap_out()
        assert adopted.try_swap_in()
        receiver.sleep()
        sender.sleep()
        sender.wake()
        receiver.wake()
        write(adopted, 10, 12, 2)
        assert values(adopted) == [1] * 10 + [2] * 2
        assert values(vtensor) == [1] * 10


def test_a_trace_with_a_hand_over_is_replayed(tmp_path: Path) -> None:
    with pair() as (sender, receiver):
        _, parcel = exported(sender)
        receiver.start_trace(tmp_path / "trace")
        adopted = receiver.adopt(parcel)
        adopted.extend(14)
        receiver.export(adopted).close()
        adopted.release()
        receiver.stop_trace()
    report = replay(tmp_path / "trace", device="sim")
    assert (report.num_skipped, report.operations["adopt"], report.operations["export"]) == (
        0,
        1,
        1,
    )


@pytest.mark.parametrize("wrong", ["layout", "places", "is_there", "num_tokens", "files"])
def test_a_parcel_that_does_not_fit_is_refused_before_anything_is_mapped(wrong: str) -> None:
    with pair() as (sender, receiver):
        _, parcel = exported(sender)
        description, files = parcel.describe(), parcel.files
        if wrong == "layout":
            description["layout"] = "another"
        elif wrong == "places":
            description["places"] = [0, 1 << 30, CHUNK, 3]
        elif wrong == "is_there":
            description["is_there"] = [2, 1]
        elif wrong == "num_tokens":
            description["num_tokens"] = 64
        else:
            files = [os.memfd_create("stranger")]
            os.ftruncate(files[0], 1 << 20)
        with pytest.raises(HandoverError):
            receiver.adopt(Parcel.from_files(description, files))
        assert receiver.stats().resident_bytes == 0
        if wrong == "files":
            os.close(files[0])
        parcel.close()


WINDOWED = KVGroup((0, 1), 2, 32, 32, window=8)


@pytest.mark.parametrize(
    ("sent", "other"),
    [
        (SPEC, replace(SPEC, num_kv_heads=4, head_dim=16)),
        (SPEC, replace(SPEC, num_kv_heads=2, head_dim=64, dtype="bfloat16")),
        (SPEC, replace(SPEC, layers_per_plane=1)),
        (SPEC, KVSpec.of_groups([WINDOWED], max_seq_len=64)),
        (SPEC, KVSpec.of_groups([KVGroup((0,), 2, 32, 32), KVGroup((1,), 2, 32, 32)], 64)),
        (
            KVSpec.of_groups([WINDOWED], max_seq_len=64),
            KVSpec.of_groups([replace(WINDOWED, window=9)], max_seq_len=64),
        ),
    ],
)
def test_a_parcel_of_other_heads_dtype_planes_or_windows_is_refused(
    sent: KVSpec, other: KVSpec
) -> None:
    """Of as many bytes a token all of them: nothing but what is told of the layout tells them
    apart."""
    assert sent.bytes_per_token == other.bytes_per_token
    with open_manager(sent) as sender, open_manager(other) as receiver:
        vtensor = sender.create(to_export=True)
        vtensor.extend(10)
        parcel = sender.export(vtensor)
        with pytest.raises(HandoverError, match="heads, dtype, layers per plane or chunk_bytes"):
            receiver.adopt(parcel)
        assert receiver.stats().resident_bytes == 0
        parcel.close()


def test_a_parcel_is_adopted_once() -> None:
    with pair() as (sender, receiver):
        _, parcel = exported(sender)
        receiver.adopt(parcel)
        with pytest.raises(HandoverError, match="already"):
            receiver.adopt(parcel)


def test_a_description_that_is_none_is_refused() -> None:
    other = {"is_there": [], "num_tokens": 1, "continues": 1, "layout": ""}
    below_nothing = [0, 0, 1, -(1 << 40), 0, 0, 1, 1 << 40]  # chunks, together 0
    for bad in ({}, {"places": [0], **other}, {"places": below_nothing, **other}):
        with pytest.raises(HandoverError, match="badly described"):
            Parcel.from_files(bad, [])


def test_shortage_leaves_the_parcel_for_another_attempt() -> None:
    with pair(memory_budget=4 * CHUNK) as (sender, receiver):
        _, parcel = exported(sender)
        busy = receiver.create()
        write(busy, 0, 16)
        with pytest.raises(OutOfMemoryError):
            receiver.adopt(parcel)
        busy.release()
        assert values(receiver.adopt(parcel)) == [1] * 10


def test_layers_with_a_window_and_groups_are_handed_over() -> None:
    spec = KVSpec.of_groups(
        [KVGroup((0,), 2, 32, 32), KVGroup((1,), 2, 32, 32, window=6)], max_seq_len=64
    )
    with pair(spec=spec) as (sender, receiver):
        vtensor = sender.create(to_export=True)
        vtensor.extend(30)
        vtensor.k(0)[:] = 5
        vtensor.k(1)[:] = 6
        sender.forget([vtensor], [30])
        sender.drain()
        adopted = receiver.adopt(sender.export(vtensor))
        assert (adopted.k(0) == 5).all()
        assert (adopted.k(1)[25:] == 6).all()


def test_a_device_that_cannot_hand_memory_over_says_so() -> None:
    with (
        VTensorManager(SPEC, "sim") as manager,
        pytest.raises(ValueError, match="sim driver cannot hand memory"),
    ):
        manager.create(to_export=True)


def has_failed_at(k: int, out_of_memory: bool) -> bool:
    """Whether the k-th call of an export with copies, or of the adoption, was there to fail."""
    with pair() as (sender, receiver):
        first = sender.create(TOKENS, to_export=True)
        write(first, 0, 10)
        first.record_prefix(TOKENS)
        vtensor = sender.create([*TOKENS[:8], 50, 51], to_export=True)
        write(vtensor, 8, 10, 2)
        failed = False
        parcel = None
        sender.faults.fail(k, out_of_memory=out_of_memory)
        try:
            parcel = sender.export(vtensor)
        except (DriverError, OutOfMemoryError):
            failed = True
        sender.check_integrity()
        sender.faults.fail(0)
        parcel = parcel or sender.export(vtensor)
        receiver.faults.fail(k, out_of_memory=out_of_memory)
        try:
            adopted = receiver.adopt(parcel)
        except (DriverError, OutOfMemoryError):
            failed = True
            receiver.check_integrity()
            receiver.faults.fail(0)
            adopted = receiver.adopt(parcel)
        receiver.faults.fail(0)
        assert values(adopted) == [1] * 8 + [2] * 2
        assert values(vtensor) == [1] * 8 + [2] * 2
    return failed


@pytest.mark.parametrize("out_of_memory", [False, True])
def test_whatever_call_fails_both_sides_are_whole(out_of_memory: bool) -> None:
    num_failed = next(k for k in range(1, 60) if not has_failed_at(k, out_of_memory)) - 1
    assert num_failed >= 5
