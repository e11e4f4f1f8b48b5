"""`flexinfer simulate`: a trace on a fleet of replicas, in virtual time, router by router."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from flexinfer.cli.errors import check_folder, usage_errors
from flexinfer.cli.fitting_table import FittingTable
from flexinfer.cli.result_file import result_file
from flexinfer.cli.simulate.options import SimulateOptions
from flexinfer.cli.terminal_text import size_text
from flexinfer.runtime.json_options import from_mapping
from flexinfer.runtime.reasons import reason_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flexinfer.loadgen.trace import TraceEntry
    from flexinfer.simulation.replica import ReplicaShape
    from flexinfer.simulation.step_cost import StepCost

COLUMNS = {
    "hit\nrate": ("hit_rate", "{:.3f}"),
    "TTFT\np50": ("p50_ttft_ms", "{:.0f}"),
    "p90": ("p90_ttft_ms", "{:.0f}"),
    "p99": ("p99_ttft_ms", "{:.0f}"),
    "end\np99": ("p99_e2el_ms", "{:.0f}"),
    "load\nskew": ("load_skew", "{:.2f}"),
    "busy": ("utilisation", "{:.0%}"),
    "fails": ("num_failed", "{}"),
}


def run_simulate(options: SimulateOptions) -> None:
    """Run the trace once for each router, and print what that came to."""
    with usage_errors():
        from flexinfer.loadgen.trace import read_trace
        from flexinfer.routing.routers import ROUTERS

        if options.json is not None:
            check_folder(options.json, "--json")
        if options.save_step_cost is not None:
            check_folder(options.save_step_cost, "--save-step-cost")
        routers = options.router or list(ROUTERS)
        for router in routers:
            if router not in ROUTERS:
                raise ValueError(f"--router {router!r} must be one of {', '.join(ROUTERS)}")
        entries = read_trace(options.trace, options.num_prompts)
        cost = _cost(options)
        shape = _shape(options, cost)
        results = {router: _run(options, router, entries, shape) for router in routers}
    report = {
        "trace": options.trace.name,
        "num_requests": len(entries),
        "replicas": options.replicas,
        "step_cost": asdict(cost),
        "routers": results,
    }
    _print(report)
    if options.json is not None:
        with result_file(options.json) as file:
            file.write_text(json.dumps(report, indent=1) + "\n")


def _cost(options: SimulateOptions) -> StepCost:
    from flexinfer.simulation.step_cost import SHIPPED_COST, StepCost

    if options.calibrate is not None:
        from flexinfer.cli.simulate.calibrate import calibrate

        cost = calibrate(options.calibrate)
        if options.save_step_cost is not None:
            with result_file(options.save_step_cost) as file:
                file.write_text(json.dumps(asdict(cost), indent=1) + "\n")
        return cost
    if options.step_cost is None:
        return SHIPPED_COST
    try:
        return from_mapping(StepCost, "it", options.step_cost.read_text())
    except ValueError as error:
        raise ValueError(
            f"{options.step_cost} is not a step cost, as --save-step-cost writes one: "
            f"{reason_of(error)}"
        ) from error


def _shape(options: SimulateOptions, cost: StepCost) -> ReplicaShape:
    from flexinfer.runtime.units import parse_bytes
    from flexinfer.scheduler_config import SchedulerConfig
    from flexinfer.simulation.replica import ReplicaShape
    from flexinfer.vtensor import KVSpec

    return ReplicaShape(
        spec=KVSpec(
            num_layers=options.num_layers,
            num_kv_heads=options.num_kv_heads,
            head_dim=options.head_dim,
            dtype=options.dtype,
            max_seq_len=options.max_model_len,
        ),
        kv_cache_bytes=parse_bytes(options.kv_cache_memory_bytes, "kv_cache_memory_bytes"),
        chunk_bytes=parse_bytes(options.chunk_bytes, "chunk_bytes"),
        scheduler=SchedulerConfig(
            max_model_len=options.max_model_len,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
        ),
        cost=cost,
    )


def _run(
    options: SimulateOptions, router: str, entries: Sequence[TraceEntry], shape: ReplicaShape
) -> dict[str, Any]:
    from rich.console import Console
    from rich.progress import Progress

    from flexinfer.loadgen.workload import TraceScale
    from flexinfer.simulation.arrivals import arrivals_of
    from flexinfer.simulation.fleet import Fleet
    from flexinfer.simulation.report import summarise

    scale = TraceScale(time=options.trace_time_scale, length=options.trace_length_scale)
    arrivals = arrivals_of(entries, scale, options.max_model_len)
    fleet = Fleet(options.replicas, shape, router, options.seed)
    console = Console(stderr=True)
    # Where there is no terminal a transient bar would leave an empty line.
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(router, total=len(entries))
        run = fleet.run(arrivals, lambda: progress.advance(task))
    return summarise(run, shape.spec.bytes_per_token)


def _print(report: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    title = f"{report['num_requests']} requests, {report['replicas']} replicas; times in ms"
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,  # with times of five digits it takes 80 columns
    )
    table.add_column("router")
    for head in (*COLUMNS, "KV\nelsewhere"):
        table.add_column(head, justify="right")
    for router, numbers in report["routers"].items():
        cells = [text.format(numbers[name]) for name, text in COLUMNS.values()]
        table.add_row(router, *cells, size_text(numbers["kv_elsewhere_bytes"]))
    Console().print(FittingTable(table))
