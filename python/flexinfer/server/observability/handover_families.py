"""Prometheus metric families of servers that hand KV over, or take it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric

from flexinfer.engine.prometheus_families import Maker
from flexinfer.server.handover.stats import FAILURES

if TYPE_CHECKING:
    from flexinfer.server.handover.stats import HandoverStats


def handover_families(stats: HandoverStats, make: Maker) -> Iterator[Metric]:
    """Of a server that prefills for others, or decodes what others prefill."""
    sent, adopted = ("sent",), ("adopted",)
    yield make.counters(
        "handover_parcels",
        "Prompts whose KV was handed over.",
        ("direction",),
        {sent: stats.parcels_sent, adopted: stats.parcels_adopted},
    )
    yield make.counters(
        "handover_bytes",
        "Their KV, in whole chunks.",
        ("direction",),
        {sent: stats.bytes_sent, adopted: stats.bytes_adopted},
    )
    yield make.counter("handover_tokens", "Tokens that were adopted.", stats.tokens_adopted)
    yield make.counter(
        "handover_chunks_copied",
        "Of what was sent: it lay beside others' KV.",
        stats.chunks_copied,
    )
    yield make.counters(
        "handover_failures",
        "Prompts that were prefilled here after all, by reason.",
        ("reason",),
        {(reason,): stats.failures[reason] for reason in FAILURES},
    )
