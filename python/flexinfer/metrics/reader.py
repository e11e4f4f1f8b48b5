"""Metric families as plain values: what `LLM.get_metrics()` gives. Names are vLLM's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family
    from prometheus_client.samples import Sample

POSITION = "position"
"""The label of counters that are one vector."""


@dataclass
class Metric:
    """One of a name may be there for each set of labels."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """It only grows."""

    value: int


@dataclass
class Vector(Metric):
    """Counters side by side: accepted tokens by their position in a proposal."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """It goes up and down."""

    value: float


@dataclass
class Histogram(Metric):
    """Observations in buckets."""

    count: int
    sum: float
    buckets: dict[str, int]
    """Upper bound -> how many were no larger; "+Inf": all."""


def read_metrics(families: Iterable[Family]) -> list[Metric]:
    """Counters are whole numbers, those of seconds cut off, as in vLLM."""
    return [metric for family in families for metric in _read(family)]


def _read(family: Family) -> Iterator[Metric]:
    if family.type == "histogram":
        yield from _histograms(family)
    elif family.type == "gauge":
        yield from (Gauge(family.name, s.labels, s.value) for s in family.samples)
    elif any(POSITION in sample.labels for sample in family.samples):
        yield from _vectors(family)
    else:
        yield from (Counter(family.name, s.labels, int(s.value)) for s in family.samples)


def _vectors(family: Family) -> Iterator[Vector]:
    for labels, samples in _by_labels(family.samples, POSITION):
        samples.sort(key=lambda sample: int(sample.labels[POSITION]))
        yield Vector(family.name, labels, [int(sample.value) for sample in samples])


def _histograms(family: Family) -> Iterator[Histogram]:
    for labels, samples in _by_labels(family.samples, "le"):
        buckets = {s.labels["le"]: int(s.value) for s in samples if "le" in s.labels}
        (total,) = (s.value for s in samples if s.name.endswith("_sum"))
        yield Histogram(family.name, labels, buckets["+Inf"], total, buckets)


def _by_labels(
    samples: Iterable[Sample], but: str
) -> Iterator[tuple[dict[str, str], list[Sample]]]:
    """Samples with the same labels, but for one."""
    groups: dict[tuple[tuple[str, str], ...], list[Sample]] = {}
    for sample in samples:
        labels = {name: value for name, value in sample.labels.items() if name != but}
        groups.setdefault(tuple(labels.items()), []).append(sample)
    for key, group in groups.items():
        yield dict(key), group
