"""What a server's /metrics say of speculation, before a load and after it.

Names of the results are those of `vllm bench serve`; vLLM's servers are read as well.
"""

from __future__ import annotations

from flexinfer.cli.endpoint import Endpoint, EndpointError

COUNTS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
Counts = dict[str, float]


def read_counts(endpoint: Endpoint) -> Counts | None:
    """Totals by the names in COUNTS; None of a server without metrics, or without speculation."""
    try:
        text = endpoint.get_text("/metrics")
    except EndpointError:
        return None
    counts: Counts = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        name, _, value = line.rpartition(" ")
        name = name.partition("{")[0].partition(":spec_decode_")[2].removesuffix("_total")
        if name in COUNTS:
            counts[name] = counts.get(name, 0.0) + float(value)
    return counts if len(counts) == len(COUNTS) else None


def summarize_drafts(before: Counts | None, after: Counts | None) -> Counts:
    """Of the time between; empty where nothing was drafted."""
    if before is None or after is None:
        return {}
    drafts, drafted, accepted = (after[name] - before[name] for name in COUNTS)
    if drafts <= 0 or drafted <= 0:
        return {}
    return {
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": drafted,
        "spec_decode_accepted_tokens": accepted,
        "spec_decode_acceptance_rate": 100 * accepted / drafted,
        "spec_decode_acceptance_length": 1 + accepted / drafts,
    }
