"""The demo's picture: physical bytes of the KV cache over time, with and without sharing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexinfer.cli.demo.records import Run

MIB = 1 << 20


def plot_memory(file: Path, cached: Run, uncached: Run) -> None:
    """Draw both runs. The filled area is what sharing saves."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    times = [sample.time_s for sample in cached.samples]
    used = [sample.used_bytes / MIB for sample in cached.samples]
    unshared = [sample.unshared_bytes / MIB for sample in cached.samples]
    # A step's memory is taken before its computation: it stands since the sample before.
    steps: dict[str, Any] = {"drawstyle": "steps-pre"}
    axes.plot(times, unshared, "tab:red", label="each conversation with its own chunks", **steps)
    axes.plot(times, used, "tab:green", label="shared chunks (measured)", **steps)
    axes.fill_between(times, used, unshared, step="pre", color="tab:green", alpha=0.12)
    axes.plot(
        [sample.time_s for sample in uncached.samples],
        [sample.used_bytes / MIB for sample in uncached.samples],
        "tab:gray",
        linewidth=0.8,
        label="prefix cache off: nothing kept between turns (measured)",
        **steps,
    )
    for sample, after in zip(cached.samples, cached.samples[1:], strict=False):
        if after.turn != sample.turn:
            axes.axvline(after.time_s, color="black", alpha=0.15, linewidth=0.8)
    axes.set(
        xlabel="seconds (thin lines: turns of the run with prefix cache)",
        ylabel="physical KV memory, MiB",
        ylim=(0, None),
        title=f"{cached.num_conversations} conversations, {cached.num_turns} turns each",
    )
    figure.legend(loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    figure.savefig(file, dpi=150)
    plt.close(figure)
