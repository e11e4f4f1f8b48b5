"""The memory of a server in a few lines: what is used, shared and free, and what the most is."""

from __future__ import annotations

from collections.abc import Iterator

from flexinfer.cli.inspect.report import MemoryReport
from flexinfer.cli.terminal_text import one_row, size_text

MAX_PREFIXES = 5
NAME_CHARS = 24
"""A shorter start is followed by what goes on from it."""
BAR_CHARS = 24
HINT = "More: --map, --tables, --json, --picture FILE; --help says what they show"


def summary_lines(report: MemoryReport, width: int) -> Iterator[str]:
    """At most `width` characters each."""
    lines = [
        f"{one_row(report.model)}, chunks of {size_text(report.chunk_bytes * report.num_planes)}"
    ]
    lines += [f"{head:<9} {text}" for head, text in _numbers(report)]
    lines += [*_prefixes(report), HINT]
    return (line if len(line) <= width else f"{line[: width - 1]}…" for line in lines)


def _numbers(report: MemoryReport) -> Iterator[tuple[str, str]]:
    stats, engine = report.stats, report.engine
    if report.replica:
        names = ", ".join(report.replicas)
        yield "replica", f"{report.replica}, of {names}: --replica NAME shows another"
    used = stats["resident_bytes"] - stats["free_bytes"]
    budget = stats["budget_bytes"]
    filled = round(BAR_CHARS * min(1.0, used / budget)) if budget else 0
    bar = "█" * filled + "░" * (BAR_CHARS - filled)
    yield "memory", f"{bar} {size_text(used)} used of {size_text(budget)}"
    yield "", f"{size_text(stats['free_bytes'])} more kept ready"
    saved, shared = size_text(stats["saved_bytes"]), size_text(stats["shared_bytes"])
    yield "shared", f"{shared} by running requests, which saves {saved}"
    if any(group.window is not None for group in report.groups):
        yield "layers", _layers(report)
    if engine:
        state = ", the engine is asleep" if engine.get("is_sleeping") else ""
        counts = ("running", "waiting", "swapped")
        yield (
            "requests",
            ", ".join(f"{engine.get(f'num_{one}', 0)} {one}" for one in counts) + state,
        )
    left = f"{size_text(stats['available_bytes'])} can still be had"
    is_short = engine.get("num_waiting", 0) > 0 and stats["available_bytes"] < budget / 20
    evicted = stats["chunks_evicted"]
    state = "high" if is_short else "none"
    yield "pressure", f"{state}: {left}, {evicted:,} chunks evicted so far"


def _layers(report: MemoryReport) -> str:
    """Which layers keep what; and how much of the running requests' windows have left."""
    parts = []
    for group in report.groups:
        keep = "keeps" if group.num_layers == 1 else "keep"
        what = "all tokens" if group.window is None else f"the last {group.window:,}"
        parts.append(f"{group.num_layers} {keep} {what}")
    back = sum(use.num_given_back for use in report.vtensors if use.state == "live")
    return f"{', '.join(parts)}; {back:,} rows given back by running requests"


def _prefixes(report: MemoryReport) -> Iterator[str]:
    """The longest recorded prefixes, by their first words."""
    parents = {use.parent for use in report.prefixes}
    leaves = [idx for idx in range(len(report.prefixes)) if idx not in parents]
    leaves.sort(key=lambda idx: -report.prefixes[idx].end_tokens)
    recorded = size_text(report.stats["recorded_bytes"])
    yield f"{'prefixes':<9} {len(leaves)} recorded, {recorded}"
    for idx in leaves[:MAX_PREFIXES]:
        name = _words(report, idx) or report.prefixes[idx].label
        yield f"{report.prefixes[idx].end_tokens:>16,} tokens  {name}"
    if len(leaves) > MAX_PREFIXES:
        yield f"{len(leaves) - MAX_PREFIXES:>16,} more"


def _words(report: MemoryReport, idx: int) -> str:
    path: list[str] = []
    while idx >= 0:
        path.insert(0, report.prefixes[idx].text)
        idx = report.prefixes[idx].parent
    words = ""
    for text in path:
        words += text if len(words) < NAME_CHARS else ""
    return one_row(words)
