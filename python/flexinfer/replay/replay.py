"""Runs the operations of a trace again, on any driver, without a model.

To reproduce a bug, and to ask what another chunk size, layout, budget or policy would have done::

    report = replay("serving.trace", chunk_bytes="64KiB")
    print(report.replayed.peak_resident_bytes, report.recorded.peak_resident_bytes)

Operations run one after another in the order in which they took effect, without pauses. What the
background worker mapped ahead, or gave back, is handed to the worker again and waited for.

A replay launches no kernels: those of a step are over when the step ends. Where another setting
makes memory short that was not, the replay notes a shortage and goes on; it schedules nothing.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from flexinfer.errors import OutOfMemoryError
from flexinfer.replay.meter import NOT_RUN, ReplayMeter
from flexinfer.replay.reader import Record, TraceReader
from flexinfer.replay.report import ReplayReport, Shortage, Totals
from flexinfer.vtensor import SimConfig, VTensor, VTensorManager, parse_bytes

__all__ = ["ReplayReport", "Shortage", "Totals", "replay"]


def replay(
    path: str | os.PathLike[str],
    device: str = "sim",
    *,
    chunk_bytes: int | str | None = None,
    layers_per_plane: int | None = None,
    memory_budget: int | str | None = None,
    park: bool | None = None,
    dedup: bool | None = None,
    alias: bool | None = None,
    pre_extend: bool | None = None,
    latency: Literal["a100", "none"] = "a100",
    allow_truncated: bool = False,
) -> ReplayReport:
    """Run the trace at ``path`` again. None keeps what was recorded.

    Args:
        device: ``"sim"``, ``"cpu"`` or ``"cuda"``.
        memory_budget: changes of the budget that the trace holds are scaled along.
        latency: costs of driver calls on ``"sim"``; they are counted, not waited for.
        allow_truncated: replay a file that was cut off as far as it goes.

    Raises TraceError for a file that cannot be replayed, ValueError for settings without sense.
    """
    reader = TraceReader(path, allow_truncated=allow_truncated)
    header, options = reader.header, reader.header.options
    spec = header.kv_spec(layers_per_plane)
    budget = header.memory_budget
    if memory_budget is not None:
        budget = parse_bytes(memory_budget, "memory_budget")
    manager = VTensorManager(
        spec,
        device,
        max_requests=header.max_requests,
        memory_budget=budget,
        chunk_bytes=header.chunk_bytes if chunk_bytes is None else chunk_bytes,
        scrub=options["scrub"],
        park=options["park"] if park is None else park,
        alias=options["alias"] if alias is None else alias,
        dedup=options["dedup"] if dedup is None else dedup,
        pre_extend=options["pre_extend"] if pre_extend is None else pre_extend,
        min_free_bytes=options["min_free_bytes"],
        max_free_bytes=options.get("max_free_bytes"),
        prefix_cache_bytes=options.get("prefix_cache_bytes"),
        prefix_cache_fraction=options.get("prefix_cache_fraction", 1.0),
        swap_space=options["swap_space_bytes"],
        sim=SimConfig(latency) if device.startswith("sim") else None,
    )
    with manager:
        return _Replay(reader, manager, device, budget / header.memory_budget).run()


@dataclass
class _Live:
    """A vTensor of the replay, and which of its tokens are its own."""

    vtensor: VTensor
    num_tokens: int
    shared: int  # leading tokens that are recorded, or counted with another vTensor
    swapped: bool = False
    parent: int | None = None  # while the shared tokens are counted there


class _Replay:
    def __init__(
        self, reader: TraceReader, manager: VTensorManager, device: str, budget_scale: float
    ) -> None:
        self._reader = reader
        self._manager = manager
        self._budget_scale = budget_scale
        self._live: dict[int, _Live] = {}
        self._gone: set[int] = set()  # recorded vTensors that the replay does not have (any more)
        self._labels: dict[int, str] = {}
        self._pins: dict[str, list[tuple[str, float]]] = {}  # owner -> (pin, expires at us)
        self._num_pins = 0
        self._line = 0
        self._report = ReplayReport(
            path=reader.path,
            device=device,
            chunk_bytes=manager.chunk_bytes,
            layers_per_plane=manager.spec.layers_per_plane or 1,
            memory_budget_bytes=manager.memory_budget,
            truncated=reader.truncated,
        )
        self._meter = ReplayMeter(
            manager, self._report, reader.header.chunk_bytes, self._own_tokens
        )
        self._run_op: dict[str, Callable[[Record], None]] = {
            "create": self._create,
            "fork": self._fork,
            "adopt": self._adopt,
            "release": self._release,
            "extend": self._extend,
            **dict.fromkeys(NOT_RUN, lambda record: None),
            "map_ahead": self._map_ahead,
            "forget": self._forget,
            "upkeep": self._upkeep,
            "begin_step": lambda record: self._manager.begin_step(),
            "end_step": lambda record: self._manager.end_step(),
            "truncate": self._truncate,
            "record_prefix": self._record_prefix,
            "match_prefix": self._match_prefix,
            "pin_prefix": self._pin_prefix,
            "unpin_prefix": self._unpin_prefix,
            "expire_pins": self._expire_pins,
            "reset_prefix_cache": self._reset_prefix_cache,
            "swap_out": self._swap_out,
            "swap_in": self._swap_in,
            "sleep": lambda record: self._sleep(),
            "wake": self._wake,
            "evict": lambda record: self._discard(self._manager.evict(record["n"])),
            "trim": lambda record: self._discard(self._manager.trim()),
            "set_budget": self._set_budget,
        }

    # -------------------------------------------------------------------------------- the loop

    def run(self) -> ReplayReport:
        started = time.perf_counter()
        self._restore_live()
        operations: Counter[str] = Counter()
        for line, record in self._reader:
            self._line = line
            kind = record["k"]
            try:
                if kind == "call":
                    self._meter.note_call(record)
                elif kind == "label":
                    self._labels[record["id"]] = record["label"]
                else:
                    operations[record["op"]] += 1
                    self._operation(record)
            except KeyError as error:
                name = record.get("op", record.get("call", kind))
                raise self._reader.error(line, f"{name} lacks the field {error}") from None
        report = self._report
        report.wall_s = time.perf_counter() - started
        report.operations = dict(operations)
        report.num_operations = operations.total()
        self._meter.finish()
        return report

    def _operation(self, record: Record) -> None:
        run = self._run_op.get(record["op"])
        if run is None:
            known = ", ".join(sorted(self._run_op))
            raise self._reader.error(
                self._line, f"operation {record['op']!r} is unknown; known are {known}"
            )
        self._meter.note_recorded(record)
        if record.get("failed") and "result" not in record:
            self._report.num_skipped += 1
            return
        run(record)
        self._meter.note_run()

    def _own_tokens(self) -> int:
        """Tokens that no other vTensor and no recorded prefix counts."""
        return sum(
            max(0, live.num_tokens - live.shared)
            for live in self._live.values()
            if not live.swapped
        )

    # ------------------------------------------------------------------------------ operations

    def _find(self, recorded_id: int) -> _Live | None:
        """The replay's vTensor, or None where it lost it; then the operation is skipped."""
        live = self._live.get(recorded_id)
        if live is None:
            if recorded_id not in self._gone:
                raise self._reader.error(
                    self._line, f"vTensor {recorded_id} was never created in this trace"
                )
            self._report.num_skipped += 1
        return live

    def _short(self, record: Record, recorded_id: int) -> None:
        label = self._labels.get(recorded_id, "")
        self._report.shortages.append(Shortage(self._line, record["op"], recorded_id, label))
        self._report.replayed.num_shortages += 1

    def _same_shortage(self, succeeded: bool) -> None:
        """For an operation that was short when it was recorded."""
        if succeeded:
            self._report.num_shortages_avoided += 1
        else:
            self._report.replayed.num_shortages += 1

    def _discard(self, result: object) -> None:
        del result

    def _restore_live(self) -> None:
        """vTensors from before the trace: their lengths are known, what they shared is not."""
        for recorded_id, num_tokens, swapped in self._reader.header.live:
            vtensor = self._manager.try_create()
            if vtensor is None or swapped or not vtensor.try_extend(num_tokens):
                self._gone.add(recorded_id)
            else:
                self._live[recorded_id] = _Live(vtensor, num_tokens, 0)

    def _create(self, record: Record) -> None:
        if not record["result"]:
            self._report.replayed.num_shortages += 1
            return
        vtensor = self._manager.try_create(
            self._reader.tokens(record) if "tokens" in record else None,
            cache_salt=record["salt"],
            expected_tokens=record.get("expected", 0),
        )
        if vtensor is None:
            self._short(record, record["result"])
            self._gone.add(record["result"])
            return
        cached = vtensor.num_cached_tokens
        self._live[record["result"]] = _Live(vtensor, cached, cached)

    def _adopt(self, record: Record) -> None:
        """KV of another process, which is not there now: the same length, in memory of its own."""
        self._create(record)
        if live := self._live.get(record["result"]):
            live.num_tokens = record["n"] if live.vtensor.try_extend(record["n"]) else 0

    def _fork(self, record: Record) -> None:
        if not record["result"]:
            self._report.replayed.num_shortages += 1
            return
        parent = self._find(record["id"])
        try:
            child = None if parent is None else parent.vtensor.fork()
        except OutOfMemoryError:
            child = None
            self._short(record, record["id"])
        if parent is None or child is None:
            self._gone.add(record["result"])
            return
        length = parent.num_tokens
        self._live[record["result"]] = _Live(child, length, length, parent=record["id"])

    def _release(self, record: Record) -> None:
        live = self._find(record["id"])
        self._gone.add(record["id"])
        if live is None:
            return
        live.vtensor.release()
        del self._live[record["id"]]
        self._hand_on(record["id"], live)

    def _hand_on(self, recorded_id: int, gone: _Live) -> None:
        """The fork that shares most of a released vTensor counts these tokens from now on."""
        forks = {key: live for key, live in self._live.items() if live.parent == recorded_id}
        heir = max(forks, key=lambda key: forks[key].shared, default=None)
        for key, live in forks.items():
            live.parent = gone.parent if key == heir else heir
            if key == heir:
                live.shared = min(live.shared, gone.shared)

    def _extend(self, record: Record) -> None:
        pairs = [
            (recorded_id, live, num_tokens)
            for recorded_id, num_tokens in zip(record["ids"], record["n"], strict=True)
            if (live := self._find(recorded_id)) is not None and not live.swapped
        ]
        extended = self._manager.try_extend([p[1].vtensor for p in pairs], [p[2] for p in pairs])
        if not record["result"]:
            self._same_shortage(extended)
        for recorded_id, live, num_tokens in pairs:
            if extended or (record["result"] and live.vtensor.try_extend(num_tokens)):
                live.num_tokens = max(live.num_tokens, num_tokens)
            elif record["result"]:
                self._short(record, recorded_id)

    def _map_ahead(self, record: Record) -> None:
        live = self._find(record["id"]) if record["id"] not in self._gone else None
        if live is not None:
            self._manager.pre_extend([live.vtensor], [record["n"]])
            self._manager.drain()

    def _upkeep(self, record: Record) -> None:
        self._manager.pre_extend([], [])  # the worker does all upkeep that is due
        self._manager.drain()

    def _forget(self, record: Record) -> None:
        pairs = zip(record["ids"], record["n"], strict=True)
        told = [(self._find(idx), n) for idx, n in pairs if idx not in self._gone]
        self._manager.forget([live.vtensor for live, _ in told if live], [n for _, n in told])
        self._manager.drain()

    def _truncate(self, record: Record) -> None:
        live = self._find(record["id"])
        if live is not None and record["n"] <= live.num_tokens:
            live.vtensor.truncate(record["n"])
            live.num_tokens = record["n"]
            live.shared = min(live.shared, live.num_tokens)

    def _record_prefix(self, record: Record) -> None:
        live = self._find(record["id"])
        if live is None or live.swapped:
            return
        tokens = self._reader.tokens(record)[: live.num_tokens]
        live.vtensor.record_prefix(tokens)
        live.shared = max(live.shared, len(tokens))

    def _match_prefix(self, record: Record) -> None:
        self._manager.match_prefix(self._reader.tokens(record), record["salt"])

    def _pin_prefix(self, record: Record) -> None:
        """Each pin gets an owner of its own: the recorded time decides when it expires."""
        self._num_pins += 1
        pin = f"{record['owner']}#{self._num_pins}"
        self._manager.pin_prefix(self._reader.tokens(record), pin, None, record["salt"])
        expires_us = record["t"] + record["ttl_s"] * 1e6 if record["ttl_s"] > 0 else float("inf")
        self._pins.setdefault(record["owner"], []).append((pin, expires_us))

    def _unpin_prefix(self, record: Record) -> None:
        for pin, _ in self._pins.pop(record["owner"], []):
            self._manager.unpin_prefix(pin)

    def _expire_pins(self, record: Record) -> None:
        for owner, pins in self._pins.items():
            for pin, expires_us in pins:
                if expires_us <= record["t"]:
                    self._manager.unpin_prefix(pin)
            self._pins[owner] = [pin for pin in pins if pin[1] > record["t"]]

    def _reset_prefix_cache(self, record: Record) -> None:
        self._manager.reset_prefix_cache()
        for live in self._live.values():
            if live.parent is None:
                live.shared = 0

    def _swap_out(self, record: Record) -> None:
        live = self._find(record["id"])
        if live is None or live.swapped:
            return
        live.swapped = live.vtensor.try_swap_out()
        if not record["result"]:
            self._same_shortage(live.swapped)
        elif not live.swapped:
            self._short(record, record["id"])

    def _swap_in(self, record: Record) -> None:
        live = self._find(record["id"])
        if live is None or not live.swapped:
            return
        live.swapped = not live.vtensor.try_swap_in(self._reader.tokens(record))
        if not record["result"]:
            self._same_shortage(not live.swapped)
        elif live.swapped:
            self._short(record, record["id"])

    def _sleep(self) -> None:
        self._manager.sleep()

    def _wake(self, record: Record) -> None:
        try:
            self._manager.wake()
        except OutOfMemoryError:
            self._short(record, 0)

    def _set_budget(self, record: Record) -> None:
        try:
            self._manager.memory_budget = int(record["n"] * self._budget_scale)
        except OutOfMemoryError:
            if record.get("result"):
                self._short(record, 0)
            else:
                self._report.replayed.num_shortages += 1
