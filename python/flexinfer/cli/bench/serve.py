"""`flexinfer bench serve`: load for any OpenAI endpoint, and what it took.

Options have the names of `vllm bench serve`; docs/tools.md says which are new.
"""

from __future__ import annotations

import json as json_module
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexinfer.cli.errors import usage_errors
from flexinfer.cli.options import ApiKey

if TYPE_CHECKING:
    from flexinfer.cli.bench.load_run import LoadSettings
    from flexinfer.loadgen.summary import Summary

FAILED = 1
SERVER, PROMPTS, TRAFFIC, RESULTS = "The server", "Prompts", "Traffic", "Results"


def serve(
    backend: Annotated[
        str, typer.Option(help="openai (completions) or openai-chat.", rich_help_panel=SERVER)
    ] = "openai",
    base_url: Annotated[
        str | None,
        typer.Option(
            "--base-url", "--url", help="Instead of --host and --port.", rich_help_panel=SERVER
        ),
    ] = None,
    host: Annotated[str, typer.Option(rich_help_panel=SERVER)] = "127.0.0.1",
    port: Annotated[int, typer.Option(rich_help_panel=SERVER)] = 8000,
    endpoint: Annotated[
        str | None, typer.Option(help="Path; without it, the backend's.", rich_help_panel=SERVER)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Served name; without it, the first of /v1/models.", rich_help_panel=SERVER
        ),
    ] = None,
    api_key: ApiKey = None,
    header: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE, may be repeated.", rich_help_panel=SERVER)
    ] = None,
    dataset_name: Annotated[
        str, typer.Option(help="random, custom or trace.", rich_help_panel=PROMPTS)
    ] = "random",
    dataset_path: Annotated[
        Path | None,
        typer.Option(help="Of custom prompts (JSON lines) or a trace.", rich_help_panel=PROMPTS),
    ] = None,
    num_prompts: Annotated[
        int, typer.Option(min=1, help="How many requests.", rich_help_panel=PROMPTS)
    ] = 100,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="The model's folder: prompts are then exactly as long as asked for; without it "
            "they are words.",
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    random_input_len: Annotated[int, typer.Option(rich_help_panel=PROMPTS)] = 256,
    random_output_len: Annotated[int, typer.Option(rich_help_panel=PROMPTS)] = 64,
    random_range_ratio: Annotated[
        float, typer.Option(help="Lengths vary by this part, 0 to 1.", rich_help_panel=PROMPTS)
    ] = 0.0,
    random_prefix_len: Annotated[
        int, typer.Option(help="Tokens that all prompts share.", rich_help_panel=PROMPTS)
    ] = 0,
    custom_output_len: Annotated[int, typer.Option(min=1, rich_help_panel=PROMPTS)] = 256,
    trace_time_scale: Annotated[
        float, typer.Option(help="Factor of a trace's times.", rich_help_panel=PROMPTS)
    ] = 1.0,
    trace_length_scale: Annotated[
        float, typer.Option(help="Factor of a trace's lengths.", rich_help_panel=PROMPTS)
    ] = 1.0,
    max_input_len: Annotated[
        int | None, typer.Option(min=1, help="Bound of a trace's prompts.", rich_help_panel=PROMPTS)
    ] = None,
    max_output_len: Annotated[
        int | None, typer.Option(min=1, help="Bound of a trace's outputs.", rich_help_panel=PROMPTS)
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos", help="Outputs exactly as long as asked for.", rich_help_panel=PROMPTS
        ),
    ] = False,
    temperature: Annotated[float, typer.Option(min=0.0, rich_help_panel=PROMPTS)] = 0.0,
    extra_body: Annotated[
        str | None, typer.Option(help="JSON that each request adds.", rich_help_panel=PROMPTS)
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Of prompts and arrivals.", rich_help_panel=PROMPTS)
    ] = 0,
    request_rate: Annotated[
        float,
        typer.Option(
            help="Requests a second; inf: all at once, or at a trace's times.",
            rich_help_panel=TRAFFIC,
        ),
    ] = math.inf,
    burstiness: Annotated[
        float,
        typer.Option(help="1: Poisson; less is burstier, more steadier.", rich_help_panel=TRAFFIC),
    ] = 1.0,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests at once, at most.", rich_help_panel=TRAFFIC)
    ] = None,
    num_warmups: Annotated[
        int, typer.Option(min=0, help="Requests before, not measured.", rich_help_panel=TRAFFIC)
    ] = 0,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            help="ttft:MS tpot:MS e2el:MS: count requests that stay within.",
            rich_help_panel=RESULTS,
        ),
    ] = None,
    more_goodput: Annotated[list[str] | None, typer.Argument(hidden=True, metavar="")] = None,
    percentile_metrics: Annotated[
        str, typer.Option(help="Of ttft, tpot, itl, e2el.", rich_help_panel=RESULTS)
    ] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[
        str, typer.Option(help="Such as 90,99.", rich_help_panel=RESULTS)
    ] = "90,99",
    json: Annotated[
        bool, typer.Option("--json", help="The result on stdout.", rich_help_panel=RESULTS)
    ] = False,
    save_result: Annotated[
        bool, typer.Option("--save-result", help="The result as a file.", rich_help_panel=RESULTS)
    ] = False,
    save_detailed: Annotated[
        bool,
        typer.Option(
            "--save-detailed", help="Every request in that file too.", rich_help_panel=RESULTS
        ),
    ] = False,
    result_dir: Annotated[Path, typer.Option(rich_help_panel=RESULTS)] = Path(),
    result_filename: Annotated[str | None, typer.Option(rich_help_panel=RESULTS)] = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE for the result, may be repeated.", rich_help_panel=RESULTS),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw latencies into this .png, .svg or .pdf.", rich_help_panel=RESULTS),
    ] = None,
    disable_tqdm: Annotated[
        bool, typer.Option("--disable-tqdm", help="No progress bar.", rich_help_panel=RESULTS)
    ] = False,
) -> None:
    """Send load to a server and measure TTFT, TPOT, ITL, latency and goodput."""
    options = dict(locals())
    with usage_errors():
        from flexinfer.cli.bench.load_run import LoadSettings, measure, write_results

        if options.pop("more_goodput"):
            if not goodput:
                raise ValueError(f"unexpected arguments: {' '.join(more_goodput or ())}")
            options["goodput"] = [*goodput, *(more_goodput or ())]
        settings = LoadSettings(**options)
        result = measure(settings)
        files = write_results(settings, result)
    if json:
        typer.echo(json_module.dumps(result.as_dict(), indent=2))
    else:
        _print(settings, result.summary, files, result.first_error)
    if result.summary.num_completed == 0:
        raise typer.Exit(FAILED)


def _print(settings: LoadSettings, summary: Summary, files: list[Path], error: str) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(_table(settings, summary))
    if error:
        console.print(f"first error: {error}", style="red", markup=False, soft_wrap=True)
    for file in files:
        console.print(f"written: {file}", soft_wrap=True)


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
    row("most requests at once", summary.max_concurrent_requests, 0)
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
