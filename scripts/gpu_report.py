"""Turns what scripts/gpu_check.sh left behind into a folder of at most eight files.

    python scripts/gpu_report.py FOLDER_OF_CALLS RESULT_FOLDER [--plots]

summary.md (for each call what passed, what did not and why, the machine, the headline numbers),
tables.txt, results.json (every benchmark's numbers, the stages, the tests), plots.png, and
logs.tar.gz (logs, the raw JSON, each test's result).
"""

from __future__ import annotations

import json
import sys
import tarfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BENCHMARKS = (
    "api_latency",
    "gpu_overlap",
    "kernels",
    "full_budget",
    "flash_kernels",
    "flash_budget",
    "end_to_end",
)
CALLS = {"1": "Call 1", "2": "Call 2", "3": "Call 3", "some": "Stages called by name"}
Report = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """What one call of gpu_check.sh left."""

    name: str
    run: Path
    stages: list[dict[str, str]]
    tests: Report
    benchmarks: dict[str, Report]

    @classmethod
    def read(cls, run: Path) -> Call:
        return cls(run.name, run, read_stages(run), read_tests(run), read_benchmarks(run))

    @property
    def bad_stages(self) -> list[str]:
        return [row["stage"] for row in self.stages if row["status"] in ("failed", "timeout")]

    def text(self, name: str) -> str:
        file = self.run / name
        return file.read_text().strip() if file.exists() else ""


def read_stages(run: Path) -> list[dict[str, str]]:
    """One row a stage: stage, status, seconds, budget, reason."""
    file = run / "stages.tsv"
    names = ("stage", "status", "seconds", "budget", "reason")
    lines = file.read_text().splitlines() if file.exists() else []
    return [dict(zip(names, line.split("\t"), strict=False)) for line in lines]


def read_benchmarks(run: Path) -> dict[str, Report]:
    found = {}
    for name in BENCHMARKS:
        file = run / f"{name}.json"
        if file.exists():
            found[name] = json.loads(file.read_text())
    return found


def read_tests(run: Path) -> Report:
    """Counts of outcomes, the failures and what never ended, and each reason for a skip with its
    count."""
    file = run / "tests.jsonl"
    if not file.exists():
        return {}
    last: dict[str, Report] = {}
    for line in file.read_text().splitlines():
        one = json.loads(line)
        if last.get(one["test"], {}).get("outcome") != "failed":
            last[one["test"]] = one
    outcomes = Counter(one["outcome"] for one in last.values())
    skips = Counter(one["reason"] for one in last.values() if one["outcome"] == "skipped")
    return {
        "outcomes": dict(outcomes),
        "failed": [
            f"{one['test']}: {one['reason']}" for one in last.values() if one["outcome"] == "failed"
        ],
        "never_ended": [one["test"] for one in last.values() if one["outcome"] == "started"],
        "skip_reasons": dict(skips),
        "seconds": {one["test"]: one["seconds"] for one in last.values() if "seconds" in one},
    }


def markdown_table(rows: list[dict[str, Any]], columns: list[str]) -> list[str]:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(row.get(name)) for name in columns) + " |" for row in rows]
    return lines


def cell(value: Any) -> str:
    if value is None or value == "":
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")


def machine_lines(benchmarks: dict[str, Report]) -> list[str]:
    """Date, hardware, driver and versions, as the first benchmark that ran saw them."""
    for report in benchmarks.values():
        environment = report["environment"]
        return [
            f"- {name}: {value}"
            for name, value in environment.items()
            if name not in ("command", "commit")
        ]
    return ["- no benchmark ran: see environment.txt in the logs"]


def headline_lines(benchmarks: dict[str, Report]) -> list[str]:
    """Each benchmark's own verdicts as tables."""
    lines: list[str] = []
    shown = {
        "api_latency": ("latency_us", "bandwidth"),
        "kernels": ("verdicts",),
        "flash_kernels": ("verdicts",),
        "full_budget": ("rows",),
        "flash_budget": ("rows",),
        "gpu_overlap": ("modes", "verdicts"),
        "end_to_end": ("rows",),
    }
    for name, report in benchmarks.items():
        lines += ["", f"## {name}", "", f"`{report['environment']['command']}`", ""]
        for field in shown[name]:
            rows = report.get(field) or []
            if rows:
                columns = list(dict.fromkeys(key for row in rows for key in row))
                lines += [*markdown_table(rows, columns), ""]
        if not report.get("complete", True):
            lines += ["- it was ended before it was through; these are the numbers until then"]
        for kind in ("left_out", "skipped", "failed"):
            lines += [f"- {kind.replace('_', ' ')}: {one}" for one in report.get(kind) or []]
    return lines


def summary(calls: list[Call]) -> str:
    bad = [f"{call.name}: {', '.join(call.bad_stages)}" for call in calls if call.bad_stages]
    verdict = f"FAILED: {'; '.join(bad)}" if bad else "every stage that ran passed"
    lines = ["# GPU check", "", f"**{verdict}.**", ""]
    benchmarks = {name: one for call in calls for name, one in call.benchmarks.items()}
    lines += [*machine_lines(benchmarks), ""]
    for number in "123":
        if number not in [call.name for call in calls]:
            lines += [f"- call {number} was not made: `scripts/gpu_check.sh {number}`"]
    for call in calls:
        lines += call_lines(call)
    return "\n".join(lines) + "\n"


def call_lines(call: Call) -> list[str]:
    """One call: what it did, what to know, its tests and its numbers."""
    lines = ["", f"# {CALLS[call.name]}", "", f"- commit: {call.text('commit')}"]
    lines += [f"- command: {call.text('command')}"]
    lines += [f"- ended: {call.text('ended') or 'not yet, or by force'}"]
    if step := call.text("next"):
        lines += [f"- {step}"]
    if notes := call.text("notes.txt"):
        lines += ["", "To know before reading on:", "", *(f"- {n}" for n in notes.splitlines())]
    lines += ["", *markdown_table(call.stages, ["stage", "status", "seconds", "budget", "reason"])]
    if call.tests:
        outcomes = ", ".join(f"{count} {name}" for name, count in call.tests["outcomes"].items())
        lines += ["", f"Tests: {outcomes}", ""]
        lines += [f"- failed: {name}" for name in call.tests["failed"]]
        lines += [f"- was running at the end: {name}" for name in call.tests["never_ended"]]
        lines += [f"- skipped {n} times: {why}" for why, n in call.tests["skip_reasons"].items()]
    return lines + headline_lines(call.benchmarks)


def plot(benchmarks: dict[str, Report], file: Path) -> str | None:
    """One picture, a panel a benchmark; returns why there is none."""
    panels = [(name, PLOTS[name]) for name in BENCHMARKS if name in benchmarks]
    if not panels:
        return "no benchmark ran"
    try:
        import matplotlib
    except ImportError as error:
        return str(error)
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(panels), 1, figsize=(11, 4.2 * len(panels)), squeeze=False)
    for (name, draw), axis in zip(panels, axes[:, 0], strict=True):
        draw(benchmarks[name], axis)
        quick = ", toy sizes on a CPU" if benchmarks[name]["quick"] else ""
        axis.set_title(f"{name}{quick}")
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    return None


def bars(axis: Any, groups: list[str], series: dict[str, list[float]], ylabel: str) -> None:
    """Grouped bars: one group a label, one bar a series."""
    width = 0.8 / max(1, len(series))
    for index, (label, values) in enumerate(series.items()):
        places = [place + index * width for place in range(len(groups))]
        axis.bar(places, values, width, label=label)
    middle = 0.4 - width / 2
    axis.set_xticks([place + middle for place in range(len(groups))], groups, fontsize=7)
    axis.set_ylabel(ylabel)
    axis.legend(fontsize=7)


def plot_api(report: Report, axis: Any) -> None:
    kinds = ["create", "map", "set_access", "unmap", "release"]
    series = {
        f"{row['chunk_mib']} MiB": [row.get(kind, 0.0) for kind in kinds]
        for row in report["latency_us"]
    }
    bars(axis, kinds, series, "us per call")
    axis.set_yscale("log")


def plot_kernels(report: Report, axis: Any) -> None:
    rows = [row for row in report["verdicts"] if row["part"] == "decode"]
    layouts = list(dict.fromkeys(row["layout"] for row in rows))
    series = {}
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        of = {row["layout"]: row["median_ratio"] for row in rows if row["kernel"] == kernel}
        series[kernel] = [of.get(layout, 0.0) for layout in layouts]
    bars(axis, layouts, series, "decode time / plain tensor")
    axis.axhline(1.0, color="black", linewidth=0.6)


def plot_overlap(report: Report, axis: Any) -> None:
    groups = [f"{row['setting']}\n{row['mode']}" for row in report["modes"]]
    names = ("p50_us", "p99_us")
    bars(
        axis,
        groups,
        {name: [row[name] for row in report["modes"]] for name in names},
        "us per step",
    )


def plot_full_budget(report: Report, axis: Any) -> None:
    rows = [row for row in report["rows"] if row.get("tokens_per_s")]
    groups = [f"{row['engine']}\n{row['layout']}\n{row['requests']}" for row in rows]
    bars(axis, groups, {"tokens/s": [row["tokens_per_s"] for row in rows]}, "tokens a second")


def plot_end_to_end(report: Report, axis: Any) -> None:
    rows = [row for row in report["rows"] if row.get("tokens_per_s")]
    groups = list(dict.fromkeys(f"{row['model']}\n{row['workload']}" for row in rows))
    series = {}
    for engine in dict.fromkeys(row["engine"] for row in rows):
        of = {
            f"{row['model']}\n{row['workload']}": row["tokens_per_s"]
            for row in rows
            if row["engine"] == engine
        }
        series[engine] = [of.get(group, 0.0) for group in groups]
    bars(axis, groups, series, "tokens a second")


PLOTS = {
    "api_latency": plot_api,
    "kernels": plot_kernels,
    "flash_kernels": plot_kernels,
    "full_budget": plot_full_budget,
    "flash_budget": plot_full_budget,
    "gpu_overlap": plot_overlap,
    "end_to_end": plot_end_to_end,
}


def main() -> None:
    folder, results = (Path(argument) for argument in sys.argv[1:3])
    results.mkdir(parents=True, exist_ok=True)
    calls = [Call.read(folder / name) for name in CALLS if (folder / name).is_dir()]
    merged = {
        call.name: {"stages": call.stages, "tests": call.tests, "benchmarks": call.benchmarks}
        for call in calls
    }
    (results / "results.json").write_text(json.dumps(merged, indent=1) + "\n")
    files = [call.run / f"{name}.txt" for call in calls for name in BENCHMARKS]
    (results / "tables.txt").write_text("\n".join(f.read_text() for f in files if f.exists()))
    text = summary(calls)
    (results / "summary.md").write_text(text)
    with tarfile.open(results / "logs.tar.gz", "w:gz") as archive:
        archive.add(folder, "calls")
    if "--plots" in sys.argv:
        benchmarks = {name: one for call in calls for name, one in call.benchmarks.items()}
        reason = plot(benchmarks, results / "plots.png")
        if reason is not None:
            text += f"\nNo plots: {reason}\n"
            (results / "summary.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
