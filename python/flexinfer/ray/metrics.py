"""One page of Prometheus' text format from those of all replicas, told apart by a label."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from flexinfer.ray.roll_call import RollCall

PAGES_TIMEOUT_S = 5.0
"""For the metrics of all replicas: less than the 10 s that Prometheus waits."""


async def metrics_of(replicas: RollCall) -> bytes:
    """What the replicas say that answer in time, and of each whether it does. Raises TimeoutError
    where it cannot even be known how many there are."""
    pages, silent = await replicas.ask(PAGES_TIMEOUT_S, "metrics")
    return merged(pages, {**dict.fromkeys(silent, 0), **dict.fromkeys(pages, 1)})


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
