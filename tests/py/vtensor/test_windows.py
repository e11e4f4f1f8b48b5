"""Layers with a window: what it has left goes back to the pool while a vTensor grows."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexinfer.replay.reader import TraceReader
from flexinfer.replay.replay import replay
from flexinfer.vtensor import KVGroup, KVSpec, VTensor, VTensorManager

CHUNK = 4096
ROW = 8  # tokens: K and V of two layers take 512 bytes a token each
WINDOW = 20

FULL = KVGroup((0,), num_kv_heads=2, key_dim=64, value_dim=64)
NEAR = KVGroup((1,), num_kv_heads=2, key_dim=64, value_dim=64, window=WINDOW)


def manager_of(*groups: KVGroup, **options: Any) -> VTensorManager:
    spec = KVSpec.of_groups(groups or (FULL, NEAR), max_seq_len=512)
    settings = {"max_requests": 4, "memory_budget": 1000 * CHUNK, "chunk_bytes": CHUNK, **options}
    return VTensorManager(spec, from_dlpack=np.from_dlpack, **settings)


def grow(vtensor: VTensor, end: int, step: int = 8) -> None:
    """Computes tokens up to ``end``: token t has the number t + 1 everywhere."""
    manager = vtensor._manager
    assert isinstance(manager, VTensorManager)
    for start in range(vtensor.num_tokens, end, step):
        stop = min(start + step, end)
        vtensor.extend(stop)
        for layer in range(2):
            for tensor in (vtensor.k(layer), vtensor.v(layer)):
                tensor[start:] = np.arange(start + 1, stop + 1)[:, None, None]
                del tensor
        manager.forget([vtensor], [stop])
        manager.drain()
    manager.check_integrity()


def numbers(vtensor: VTensor, layer: int) -> np.ndarray[Any, Any]:
    """What each token shows: its number, or 0 where it was given back."""
    return vtensor.k(layer)[:, 0, 0].copy()


def check_contents(vtensor: VTensor) -> None:
    length = vtensor.num_tokens
    expected = np.arange(1, length + 1)
    assert (numbers(vtensor, 0) == expected).all()
    first = max(0, length + 1 - WINDOW)
    assert (numbers(vtensor, 1)[first:] == expected[first:]).all()


def test_rows_behind_the_window_go_back_to_the_pool() -> None:
    with manager_of() as manager:
        vtensor = manager.create()
        grow(vtensor, 100)
        check_contents(vtensor)
        gone = (101 - WINDOW) // ROW * ROW
        assert (numbers(vtensor, 1)[:gone] == 0).all()
        assert numbers(vtensor, 1)[gone] == gone + 1
        rows, rows_gone = -(-100 // ROW), gone // ROW
        assert vtensor.info().mapped_bytes == (2 * rows + 2 * (rows - rows_gone)) * CHUNK
        assert manager.stats().chunks_given_back == 2 * rows_gone
        manager.trim()
        assert manager.resident_bytes == vtensor.info().mapped_bytes


def test_what_is_not_told_to_be_past_stays() -> None:
    with manager_of() as manager:
        vtensor = manager.create()
        vtensor.extend(200)
        manager.drain()
        assert manager.stats().chunks_given_back == 0
        manager.forget([vtensor], [WINDOW + ROW - 2])
        manager.drain()
        assert manager.stats().chunks_given_back == 0
        manager.forget([vtensor], [WINDOW + ROW - 1])  # its query reads from the second row on
        manager.drain()
        assert manager.stats().chunks_given_back == 2


def test_nothing_goes_while_a_step_may_read_it() -> None:
    with manager_of() as manager:
        vtensor = manager.create()
        vtensor.extend(100)
        manager.begin_step()
        manager.forget([vtensor], [100])
        manager.drain()
        assert manager.stats().chunks_given_back == 0
        manager.end_step()
        manager.forget([vtensor], [100])
        manager.drain()
        assert manager.stats().chunks_given_back == 20


def test_nothing_goes_while_a_view_shows_it() -> None:
    with manager_of() as manager:
        vtensor = manager.create()
        vtensor.extend(100)
        view = vtensor.k(1)
        view[:] = 7
        manager.forget([vtensor], [100])
        manager.drain()
        assert (view == 7).all()
        del view
        manager.forget([vtensor], [100])
        manager.drain()
        assert manager.stats().chunks_given_back == 20


def test_giving_back_is_the_workers_work() -> None:
    with manager_of() as manager:
        vtensor = manager.create()
        vtensor.extend(400)
        before = manager.stats()
        for length in range(0, 400, 10):
            manager.forget([vtensor], [length])
            manager.drain()
        after = manager.stats()
        assert after.chunks_given_back == 2 * (401 - 10 - WINDOW) // ROW // 2 * 2
        calls, hidden = (
            after.driver_calls["unmap"].calls - before.driver_calls["unmap"].calls,
            after.driver_calls["unmap"].hidden_us - before.driver_calls["unmap"].hidden_us,
        )
        assert calls > 0
        exposed = after.driver_calls["unmap"].us - before.driver_calls["unmap"].us - hidden
        assert exposed == pytest.approx(0, abs=1e-6)
        assert after.map_us_exposed == before.map_us_exposed


def test_a_long_vtensor_grows_within_what_its_windows_need() -> None:
    """Whether or not the worker has come to it: a shortage gives back what is due."""
    with manager_of(step_tokens=8) as manager:
        manager.memory_budget = manager.bytes_for(400)
        assert manager.memory_budget == (2 * 50 + 2 * 5) * CHUNK
        vtensor = manager.create()
        for length in range(8, 401, 8):
            vtensor.extend(length)
            manager.forget([vtensor], [length])
        assert manager.bytes_for(400, with_windows=False) == 2 * 50 * CHUNK
        manager.drain()
        manager.check_integrity()


def test_a_recorded_prefix_is_usable_where_its_windows_are() -> None:
    prompt = list(range(1, 101))
    with manager_of() as manager:
        first = manager.create(prompt)
        grow(first, 40)
        first.record_prefix(prompt[:40])
        grow(first, 100)
        first.record_prefix(prompt)
        assert manager.match_prefix(prompt) == 100
        assert manager.match_prefix(prompt[:99]) == 99  # a row begins before what it needs
        # The rows of tokens 21 to 39 are held by the record of 40; those up to 80 are gone.
        assert manager.match_prefix([*prompt[:60], 7]) == 40
        before = manager.stats().prefix_window_tokens
        second = manager.create([*prompt[:60], 7, 8])
        assert second.num_cached_tokens == 40
        assert manager.stats().prefix_window_tokens == before + 20
        assert (second.info().num_cut_tokens, second.info().cut_by_window) == (20, WINDOW)
        grow(second, 60)
        check_contents(second)
        second.record_prefix(prompt[:60])  # its rows take the place of those that were gone
        assert manager.match_prefix([*prompt[:60], 7]) == 60
        first.release()
        third = manager.create([*prompt, 101])
        assert third.num_cached_tokens == 100
        assert (third.info().num_cut_tokens, third.info().cut_by_window) == (0, 0)
        check_contents(third)
        manager.check_integrity()


@pytest.mark.parametrize("turn", [56, 57, 60, 61])
def test_the_end_of_a_turn_stays_usable_inside_of_a_row(turn: int) -> None:
    """What goes on behind it has given back the row in which it ends; the turn's own is there."""
    prompt = list(range(1, 101))
    with manager_of() as manager:
        vtensor = manager.create(prompt)
        grow(vtensor, turn)
        vtensor.record_prefix(prompt[:turn])
        grow(vtensor, 100)
        vtensor.record_prefix(prompt)
        assert [manager.match_prefix(prompt[:n]) for n in (turn, turn + 1, 80)] == [turn] * 3
        other = manager.create([*prompt[:80], 7])
        assert (other.num_cached_tokens, other.info().num_cut_tokens) == (turn, 80 - turn)
        check_contents(other)
        grow(other, 90)
        check_contents(other)
        check_contents(vtensor)


def test_a_trace_says_which_window_made_a_match_shorter(tmp_path: Path) -> None:
    prompt = list(range(1, 101))
    wide = KVGroup((2,), num_kv_heads=2, key_dim=64, value_dim=64, window=70)
    with manager_of(FULL, NEAR, wide) as manager:
        first = manager.create(prompt)
        first.extend(60)
        manager.forget([first], [60])  # the narrow window keeps rows from token 40 on
        manager.drain()
        first.extend(100)
        first.record_prefix(prompt)
        manager.start_trace(tmp_path / "trace")
        asked = prompt[:62], prompt[:45]
        found = [manager.create(tokens) for tokens in asked]
        matched = [manager.match_prefix(tokens) for tokens in asked]
        manager.stop_trace()
    assert matched == [vtensor.num_cached_tokens for vtensor in found] == [62, 0]
    ops = [record for _, record in TraceReader(tmp_path / "trace") if record["k"] == "op"]
    assert [op.get("cut") for op in ops if op["op"] == "create"] == [None, 45]
    told = [(op["recorded"], op["cut_by_window"]) for op in ops if op["op"] == "match_prefix"]
    assert told == [(62, 0), (45, WINDOW)]


def test_a_replay_gives_back_what_the_recorded_run_did(tmp_path: Path) -> None:
    prompt = list(range(1, 101))
    with manager_of() as manager:
        manager.start_trace(tmp_path / "trace")
        for end in (60, 100, 90):  # the second goes on with the first, the third beside them
            vtensor = manager.create(prompt[:end])
            for length in range(vtensor.num_tokens, end + 1):
                vtensor.extend(length)
                manager.forget([vtensor], [length])
                manager.drain()
            vtensor.record_prefix(prompt[:end])
        manager.pin_prefix(prompt, "me")
        stats = manager.stats()
    report = replay(tmp_path / "trace")
    for run in (report.recorded, report.replayed):
        assert run.chunks_given_back == stats.chunks_given_back > 0
        assert run.prefix_hit_tokens == stats.prefix_hit_tokens == 120
    assert report.recorded.peak_resident_bytes == report.replayed.peak_resident_bytes


def test_what_has_ended_meanwhile_is_passed_over(tmp_path: Path) -> None:
    """A scheduler says of a step's vTensors where they stand, whichever have ended in it."""
    with manager_of() as manager:
        manager.start_trace(tmp_path / "trace")
        first, second = manager.create(), manager.create()
        manager.extend([first, second], [100, 100])
        first.release()
        manager.forget_ids([first.id, second.id], [100, 100])
        manager.drain()
        given_back = manager.stats().chunks_given_back
        with pytest.raises(ValueError, match="num_tokens must be integers of at least 0"):
            manager.forget_ids([second.id], [-1])
    assert given_back == 2 * ((100 + 1 - WINDOW) // ROW)
    report = replay(tmp_path / "trace")
    assert (report.replayed.chunks_given_back, report.num_skipped) == (given_back, 0)


def test_eviction_takes_first_what_no_window_reads_at_the_end() -> None:
    prompt = list(range(1, 101))
    with manager_of() as manager:
        vtensor = manager.create(prompt)
        vtensor.extend(100)
        vtensor.record_prefix(prompt)  # nothing of it has been given back
        vtensor.release()
        manager.trim()
        assert manager.match_prefix(prompt[:50]) == 50
        assert manager.evict(4 * CHUNK) >= 4 * CHUNK
        assert manager.match_prefix(prompt) == 100
        manager.check_integrity()


def test_a_fork_shares_what_is_left_and_each_forgets_alone() -> None:
    with manager_of() as manager:
        parent = manager.create()
        grow(parent, 90)
        child = parent.fork()
        check_contents(child)
        grow(child, 130)
        check_contents(child)
        check_contents(parent)
        parent.release()
        check_contents(child)


def test_vtensors_of_which_all_layers_have_a_window_share_ranges() -> None:
    near = KVGroup((0,), num_kv_heads=2, key_dim=64, value_dim=64, window=2 * WINDOW)
    with manager_of(near, NEAR) as manager:
        vtensor = manager.create()
        grow(vtensor, 2 * ROW)
        fork = vtensor.fork()
        pair = [fork, vtensor]
        assert manager.shared_ranges(pair, [16, 16]) == [(fork.slot, 0, 2 * ROW, (0, 1))]
        grow(fork, 17)
        grow(vtensor, 100)
        assert manager.shared_ranges(pair, [17, 100]) == []  # what was shared is given back
        late = vtensor.fork()
        both = manager.shared_ranges([late, vtensor], [100, 100])
        assert both == [(late.slot, 0, 96, (0, 1))]


def test_truncation_goes_as_far_back_as_the_window_allows() -> None:
    with manager_of() as manager:
        vtensor = manager.create()
        grow(vtensor, 100)
        vtensor.truncate(99)
        check_contents(vtensor)
        with pytest.raises(ValueError, match=r"window of 20 needs .* have been given back"):
            vtensor.truncate(60)
        with pytest.raises(ValueError, match="given back"):
            vtensor.truncate(0)
        assert vtensor.num_tokens == 99
        manager.check_integrity()


def test_a_swapped_vtensor_comes_back_without_what_it_had_given_back() -> None:
    prompt = list(range(1, 101))
    with manager_of(swap_space=1000 * CHUNK) as manager:
        vtensor = manager.create(prompt)
        grow(vtensor, 60)
        vtensor.record_prefix(prompt[:60])
        grow(vtensor, 100)
        mapped = vtensor.info().mapped_bytes
        assert vtensor.try_swap_out()
        manager.check_integrity()
        assert vtensor.try_swap_in(prompt)
        assert vtensor.info().mapped_bytes == mapped
        check_contents(vtensor)
        manager.sleep()
        manager.check_integrity()
        manager.wake()
        check_contents(vtensor)
        grow(vtensor, 140)
        check_contents(vtensor)


READ_BELOW = """
import numpy as np
from flexinfer.vtensor import KVGroup, KVSpec, VTensorManager
spec = KVSpec.of_groups([KVGroup((0,), 2, 64, 64, window=20)], max_seq_len=512)
manager = VTensorManager(
    spec, chunk_bytes=4096, memory_budget="1MiB", unmapped={policy!r}, from_dlpack=np.from_dlpack
)
vtensor = manager.create()
vtensor.extend(100)
vtensor.k(0)[:] = 7
manager.forget([vtensor], [100])
manager.drain()
assert (vtensor.k(0)[88:] == 7).all()
print(vtensor.k(0)[:80].any())
"""


@pytest.mark.parametrize(
    ("policy", "code", "output"), [("zero", 0, "False\n"), ("guard", -signal.SIGSEGV, "")]
)
def test_below_a_window_nothing_is_read_or_the_process_ends(
    policy: str, code: int, output: str
) -> None:
    program = READ_BELOW.format(policy=policy)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (code, output), run.stderr


@pytest.mark.parametrize("window", [0, -1, True, 1.5])
def test_a_window_that_makes_no_sense_is_refused(window: Any) -> None:
    with pytest.raises(ValueError, match="window must be an integer of at least 1"):
        KVGroup((0,), 1, 64, 64, window=window)
