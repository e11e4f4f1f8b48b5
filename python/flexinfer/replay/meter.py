"""ReplayMeter: fills a ReplayReport with what the trace tells of its run and what the replay takes.

*Waste* is what resident chunks hold beyond the KV of distinct tokens; it is sampled now and then,
and whenever memory reaches a new peak.
"""

from __future__ import annotations

from collections.abc import Callable

from flexinfer.replay.reader import Record
from flexinfer.replay.report import ReplayReport, Totals
from flexinfer.vtensor import DriverCalls, VTensorManager

SAMPLE_EVERY = 64
"""Operations between two samples of waste."""
MAY_BE_SHORT = {"create", "fork", "extend", "swap_in", "swap_out", "set_budget"}
NOT_RUN = ("pre_extend", "map_ahead_failed", "give_back", "export")
"""Operations whose effect is another's, or elsewhere."""
CHUNK_COUNTERS = {
    "aliased": "chunks_aliased",
    "copied": "chunks_copied",
    "evicted": "chunks_evicted",
    "adopted": "chunks_adopted",
    "deduplicated": "chunks_deduplicated",
    "given_back": "chunks_given_back",
    "swapped_out": "chunks_swapped_out",
    "swapped_in": "chunks_swapped_in",
    "hit": "prefix_hit_tokens",
}


class ReplayMeter:
    """Counts from when it is made until `finish`. Not thread-safe."""

    def __init__(
        self,
        manager: VTensorManager,
        report: ReplayReport,
        recorded_chunk_bytes: int,
        count_own_tokens: Callable[[], int],
    ) -> None:
        """count_own_tokens: tokens of live vTensors that no recorded prefix counts."""
        self._manager = manager
        self._report = report
        self._recorded_chunk_bytes = recorded_chunk_bytes
        self._count_own_tokens = count_own_tokens
        self._before = manager.stats()
        self._recorded_calls: dict[str, list[float]] = {}
        self._num_run = 0
        self._num_samples = 0

    def note_call(self, record: Record) -> None:
        """A driver call of the recorded run."""
        entry = self._recorded_calls.setdefault(record["call"], [0, 0.0, 0.0])
        entry[0] += 1
        entry[1] += record["us"]
        entry[2] += record["us"] if record.get("worker") else 0.0

    def note_recorded(self, record: Record) -> None:
        """An operation of the recorded run: what it changed there."""
        recorded = self._report.recorded
        for key, counter in CHUNK_COUNTERS.items():
            if key in record:
                setattr(recorded, counter, getattr(recorded, counter) + record[key])
        resident = record["created"] * self._recorded_chunk_bytes
        if record["op"] != "sleep":  # its chunks count as created, though given back
            recorded.peak_resident_bytes = max(recorded.peak_resident_bytes, resident)
        if record["op"] in MAY_BE_SHORT and record.get("result") in (0, False):
            recorded.num_shortages += 1

    def note_run(self) -> None:
        """An operation has been run again."""
        self._num_run += 1
        resident = self._manager.resident_bytes
        if resident > self._report.replayed.peak_resident_bytes:
            self._report.replayed.peak_resident_bytes = resident
            self._report.waste_at_peak_bytes = self._sample()
        elif self._num_run % SAMPLE_EVERY == 0:
            self._sample()

    def finish(self) -> None:
        """The replay is over: sums and means."""
        report = self._report
        self._sample()
        recorded = self._recorded_calls.items()
        _set_calls(
            report.recorded,
            {kind: DriverCalls(int(n), us, hidden) for kind, (n, us, hidden) in recorded},
        )
        self._set_replayed()
        if self._num_samples:
            report.mean_waste_bytes /= self._num_samples
            report.mean_resident_bytes /= self._num_samples

    def _sample(self) -> int:
        """Adds a sample of waste and returns it."""
        if self._manager.asleep:
            return 0
        stats = self._manager.stats()
        distinct = stats.recorded_tokens + self._count_own_tokens()
        waste = max(0, stats.resident_bytes - distinct * self._manager.spec.bytes_per_token)
        report = self._report
        report.peak_mapped_bytes = max(report.peak_mapped_bytes, stats.mapped_bytes)
        report.mean_waste_bytes += waste
        report.mean_resident_bytes += stats.resident_bytes
        self._num_samples += 1
        return waste

    def _set_replayed(self) -> None:
        before, after = self._before, self._manager.stats()
        replayed = self._report.replayed
        for counter in CHUNK_COUNTERS.values():
            setattr(replayed, counter, getattr(after, counter) - getattr(before, counter))
        calls = {}
        for kind, call in after.driver_calls.items():
            old = before.driver_calls[kind]
            if call.calls > old.calls:
                calls[kind] = DriverCalls(
                    call.calls - old.calls, call.us - old.us, call.hidden_us - old.hidden_us
                )
        _set_calls(replayed, calls)


def _set_calls(totals: Totals, calls: dict[str, DriverCalls]) -> None:
    totals.driver_calls = calls
    totals.driver_us_hidden = sum(call.hidden_us for call in calls.values())
    totals.driver_us_exposed = sum(call.us for call in calls.values()) - totals.driver_us_hidden
