"""`flexinfer bench serve`: load for any OpenAI endpoint, and what it took.

Options have the names of `vllm bench serve`; docs/tools.md says which are new.
"""

from __future__ import annotations

import json as json_module
from typing import TYPE_CHECKING, Any

import typer

from flexinfer.cli.errors import usage_errors

if TYPE_CHECKING:
    from flexinfer.cli.bench.load_run import LoadResult, LoadSettings
    from flexinfer.cli.bench.options import LoadOptions
    from flexinfer.loadgen.summary import Summary

FAILED = 1


def serve(options: LoadOptions) -> None:
    """Send load to a server and measure TTFT, TPOT, ITL, latency and goodput."""
    with usage_errors():
        from flexinfer.cli.bench.load_run import LoadSettings, measure, write_results

        settings = LoadSettings(**vars(options))
        result = measure(settings)
    if options.json:
        typer.echo(json_module.dumps(result.as_dict(), indent=2))
    else:
        _print(settings, result)
    for file in write_results(settings, result):
        if not options.json:
            typer.echo(f"written: {file}")
    if result.summary.num_completed == 0:
        raise typer.Exit(FAILED)


def _print(settings: LoadSettings, result: LoadResult) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(_table(settings, result.summary))
    if result.drafts:
        rate, length = (result.drafts[f"spec_decode_acceptance_{x}"] for x in ("rate", "length"))
        console.print(
            f"speculation: {rate:.0f}% accepted, {length:.2f} tokens per verified proposal"
        )
    if result.first_error:
        console.print(
            f"first error: {result.first_error}", style="red", markup=False, soft_wrap=True
        )


def _table(settings: LoadSettings, summary: Summary) -> Any:
    from rich.table import Table

    from flexinfer.loadgen.summary import METRICS

    table = Table(title="Serving benchmark", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")

    def row(name: str, value: float, digits: int = 2) -> None:
        table.add_row(name, f"{value:,.{digits}f}")

    row("requests that succeeded", summary.num_completed, 0)
    row("requests that failed", summary.num_failed, 0)
    row("duration, s", summary.duration_s)
    row("prompt tokens", summary.total_input_tokens, 0)
    row("generated tokens", summary.total_output_tokens, 0)
    row("requests/s", summary.request_throughput)
    if summary.goodput is not None:
        row("goodput, requests/s", summary.goodput)
    row("generated tokens/s", summary.output_throughput)
    row("all tokens/s", summary.total_token_throughput)
    row("maximum requests at once", summary.max_concurrent_requests, 0)
    row("latest issue after plan, ms", summary.max_issue_delay_s * 1e3)
    for name in settings.shown_metrics:
        if name in summary.latencies:
            table.add_section()
            values = summary.latencies[name]
            table.add_row(f"{METRICS[name]}, ms", "")
            for label, value in (("mean", values.mean), ("median", values.median)):
                row(f"  {label}", value)
            for percentile, value in values.percentiles.items():
                row(f"  P{percentile:g}", value)
    return table
