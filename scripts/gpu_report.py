"""Turns what scripts/gpu_check.sh left behind into a folder of at most eight files.

    python scripts/gpu_report.py RUN_FOLDER LOG_FOLDER RESULT_FOLDER

summary.md (what passed, what did not and why, the machine, the headline numbers), tables.txt,
results.json (every benchmark's numbers, the stages, the tests), plots.png, and logs.tar.gz (logs,
the raw JSON, pytest's XML).
"""

from __future__ import annotations

import json
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

BENCHMARKS = ("api_latency", "kernels", "gpu_overlap", "end_to_end")
Report = dict[str, Any]


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
    """Counts of pytest's outcomes, the failures, and each reason for a skip with its count."""
    file = run / "pytest.xml"
    if not file.exists():
        return {}
    outcomes: Counter[str] = Counter()
    skips: Counter[str] = Counter()
    failed = []
    for case in ElementTree.parse(file).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        if (skip := case.find("skipped")) is not None:
            outcomes["skipped"] += 1
            skips[skip.get("message", "")] += 1
        elif case.find("failure") is not None or case.find("error") is not None:
            outcomes["failed"] += 1
            failed.append(name)
        else:
            outcomes["passed"] += 1
    return {"outcomes": dict(outcomes), "failed": failed, "skip_reasons": dict(skips)}


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
        for kind in ("left_out", "skipped", "failed"):
            lines += [f"- {kind.replace('_', ' ')}: {one}" for one in report.get(kind) or []]
    return lines


def summary(run: Path, stages: list[dict[str, str]], tests: Report, benchmarks: Report) -> str:
    bad = [row["stage"] for row in stages if row["status"] in ("failed", "timeout")]
    notes = (run / "notes.txt").read_text().splitlines() if (run / "notes.txt").exists() else []
    verdict = f"FAILED: {', '.join(bad)}" if bad else "every stage that ran passed"
    lines = ["# GPU check", "", f"**{verdict}.**", ""]
    lines += [f"- commit: {(run / 'commit').read_text().strip()}"]
    lines += [f"- command: {(run / 'command').read_text().strip()}"]
    lines += machine_lines(benchmarks)
    if notes:
        lines += ["", "## To know before reading on", "", *(f"- {note}" for note in notes)]
    lines += ["", "## Stages", ""]
    lines += markdown_table(stages, ["stage", "status", "seconds", "budget", "reason"])
    if tests:
        outcomes = ", ".join(f"{count} {name}" for name, count in tests["outcomes"].items())
        lines += ["", "## Tests", "", f"pytest: {outcomes}", ""]
        lines += [f"- failed: {name}" for name in tests["failed"]]
        lines += [f"- skipped {n} times: {why}" for why, n in tests["skip_reasons"].items()]
    lines += headline_lines(benchmarks)
    return "\n".join(lines) + "\n"


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
    "gpu_overlap": plot_overlap,
    "end_to_end": plot_end_to_end,
}


def main() -> None:
    run, logs, results = (Path(argument) for argument in sys.argv[1:4])
    results.mkdir(parents=True, exist_ok=True)
    stages, tests, benchmarks = read_stages(run), read_tests(run), read_benchmarks(run)
    merged = {"stages": stages, "tests": tests, "benchmarks": benchmarks}
    (results / "results.json").write_text(json.dumps(merged, indent=1) + "\n")
    tables = [file.read_text() for name in BENCHMARKS if (file := run / f"{name}.txt").exists()]
    (results / "tables.txt").write_text("\n".join(tables))
    reason = plot(benchmarks, results / "plots.png")
    text = summary(run, stages, tests, benchmarks)
    if reason is not None:
        text += f"\nNo plots: {reason}\n"
    (results / "summary.md").write_text(text)
    with tarfile.open(results / "logs.tar.gz", "w:gz") as archive:
        archive.add(logs, "logs")
        archive.add(run, "run")
    print(text)


if __name__ == "__main__":
    main()
