"""What `flexinfer top` shows of a sample: numbers, memory bars, latencies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flexinfer.cli.fitting_table import FittingTable
from flexinfer.cli.terminal_text import ms_text, one_row, size_text
from flexinfer.cli.top.sample import Sample

if TYPE_CHECKING:
    from rich.console import RenderableType

BAR_WIDTH = 38
"""With what stands beside it, not more than 80 columns."""
BARS = {
    "resident": "green",
    "shared": "cyan",
    "recorded": "magenta",
    "free": "blue",
    "swapped": "yellow",
}


def view(sample: Sample, before: Sample | None) -> RenderableType:
    """Everything on one screen; `before`: the sample that rates are reckoned from."""
    from rich.console import Group
    from rich.text import Text

    numbers = sample.numbers(before)
    state = "asleep" if numbers["sleeping"] else "serving" if numbers["up"] else "has ended"
    span = "since the start" if before is None else f"last {sample.time_s - before.time_s:.1f} s"
    title = Text.assemble((one_row(sample.model) or "a server", "bold"), f"  {state}  ({span})")
    return Group(title, "", _requests(numbers), "", _memory(numbers), "", _latencies(numbers))


def _requests(numbers: dict[str, Any]) -> RenderableType:
    requests, hit_rate = numbers["requests"], numbers["prefix_hit_rate"]
    accepted = numbers["acceptance_rate"]
    rows = {
        "requests": f"{requests['running']} running, {requests['waiting']} waiting, "
        f"{requests['swapped']} swapped; {numbers['requests_ended']} ended, "
        f"{numbers['preemptions']} preempted",
        "tokens/s": f"{numbers['prompt_tokens_per_s']:.0f} prompt, "
        f"{numbers['generation_tokens_per_s']:.0f} generated",
        "prefix hits": "-" if hit_rate is None else f"{hit_rate:.0%} of prompt tokens",
        "mapping": f"{numbers['exposed_us_per_step']:.1f} us per step exposed, "
        f"{numbers['hidden_us_per_step']:.1f} hidden; {numbers['driver_calls']} driver calls",
    }
    if accepted is not None:
        rows["speculation"] = f"{accepted:.0%} of proposed tokens accepted"
    return _grid([[name, text] for name, text in rows.items()])


def _memory(numbers: dict[str, Any]) -> RenderableType:
    from rich.progress_bar import ProgressBar

    sizes = numbers["memory_bytes"]
    budget = sizes["budget"]
    rows: list[list[RenderableType]] = [
        ["KV memory", f"{numbers['kv_cache_usage']:.0%} in use", f"budget {size_text(budget)}"]
    ]
    for kind, colour in BARS.items():
        total = max(budget, sizes[kind], 1)
        bar = ProgressBar(
            total, sizes[kind], BAR_WIDTH, complete_style=colour, finished_style=colour
        )
        rows.append([kind, bar, size_text(sizes[kind])])
    virtual = ", ".join(f"{size_text(sizes[kind])} {kind}" for kind in ("mapped", "reserved"))
    rows += [["virtual", virtual], ["saved by sharing", size_text(sizes["saved"])]]
    return _grid(rows)


def _latencies(numbers: dict[str, Any]) -> RenderableType:
    heads = ("ms", *next(iter(numbers["latency_s"].values())))
    rows = [
        [name.replace("_", " "), *(ms_text(value) for value in quantiles.values())]
        for name, quantiles in numbers["latency_s"].items()
    ]
    return _grid(rows, heads)


def _grid(rows: list[Any], heads: tuple[str, ...] = ()) -> RenderableType:
    from rich.table import Table

    grid = Table.grid(*heads, padding=(0, 2))
    grid.show_header = bool(heads)
    if not heads:
        grid.add_column()
    grid.columns[0].style, grid.columns[0].min_width = "dim", 19
    for row in rows:
        grid.add_row(*row)
    return FittingTable(grid)
