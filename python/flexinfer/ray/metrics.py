"""One page of Prometheus' text format from those of all replicas, told apart by a label."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from prometheus_client import generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

PAGES_TIMEOUT_S = 5.0
"""For the metrics of all replicas: less than the 10 s that Prometheus waits."""

Pages = Callable[[], Awaitable[Sequence[Awaitable[tuple[str, str]]]]]
"""Asks all replicas; each answers with its name and its page, raises, or hangs."""


class ReplicaMetrics:
    """Knows who has answered before, so that one that does not can be named. For one event loop."""

    def __init__(self, ask: Pages) -> None:
        self._ask = ask
        self._names: dict[str, None] = {}  # of who has answered, the latest last

    async def page(self) -> bytes:
        """What the replicas say that answer in time, and of each whether it does. Raises
        TimeoutError where it cannot even be known how many there are."""
        asked = await asyncio.wait_for(self._ask(), PAGES_TIMEOUT_S)
        answers = [asyncio.ensure_future(answer) for answer in asked]
        try:
            done, _ = await asyncio.wait(answers, timeout=PAGES_TIMEOUT_S) if answers else ((), ())
        finally:
            for answer in answers:
                answer.cancel()
        pages = dict(answer.result() for answer in done if answer.exception() is None)
        silent = self._silent(pages, len(answers) - len(pages))
        self._names = dict.fromkeys((*silent, *pages))
        return merged(pages, {**dict.fromkeys(silent, 0), **dict.fromkeys(pages, 1)})

    def _silent(self, pages: Mapping[str, str], count: int) -> list[str]:
        """Names of so many that did not answer: of those that answered last, if they ever did."""
        known = [name for name in self._names if name not in pages]
        missing = known[len(known) - min(count, len(known)) :]
        return missing + [f"unknown-{i}" for i in range(count - len(missing))]


class _Families:
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def merged(pages: Mapping[str, str], is_up: Mapping[str, int]) -> bytes:
    """pages: by the name of the replica; is_up: 1 or 0, of these and those that did not answer."""
    up = GaugeMetricFamily(
        "flexinfer:replica_up", "Whether the replica has given its metrics.", labels=["replica"]
    )
    for replica, value in is_up.items():
        up.add_metric([replica], value)
    families: dict[str, Metric] = {up.name: up}
    for replica, text in pages.items():
        for family in text_string_to_metric_families(text):
            merged = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            merged.samples += [
                sample._replace(labels={**sample.labels, "replica": replica})
                for sample in family.samples
            ]
    return generate_latest(_Families(list(families.values())))
