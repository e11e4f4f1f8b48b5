"""The picture of a load: distributions of its latencies, and requests over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flexinfer.loadgen.request import Outcome
from flexinfer.loadgen.summary import METRICS, values_ms


def plot_load(file: Path, outcomes: Sequence[Outcome], title: str = "") -> None:
    """Write a .png, .svg or .pdf file."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    good = [outcome for outcome in outcomes if outcome.is_success]
    figure, axes = plt.subplots(2, 3, figsize=(13, 7), layout="constrained")
    for panel, (name, text) in zip(axes.flat[:4], METRICS.items(), strict=True):
        values = sorted(value for outcome in good for value in values_ms(outcome, name))
        shares = [(idx + 1) / len(values) for idx in range(len(values))]
        panel.plot(values, shares, drawstyle="steps-post")
        panel.set(title=text, xlabel="ms", ylabel="share of values", ylim=(0, 1.02))
        panel.grid(alpha=0.3)
    _plot_running(axes.flat[4], outcomes)
    starts = [outcome.start_s for outcome in good]
    firsts = [1e3 * (outcome.first_token_s or 0.0) for outcome in good]
    axes.flat[5].plot(starts, firsts, ".", markersize=4)
    axes.flat[5].set(title="Time to first token over the run", xlabel="start, s", ylabel="ms")
    figure.suptitle(title)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _plot_running(panel: object, outcomes: Sequence[Outcome]) -> None:
    """How many requests run at each moment."""
    changes = sorted(
        [(o.start_s, 1) for o in outcomes] + [(o.start_s + o.latency_s, -1) for o in outcomes]
    )
    times, counts, running = [0.0], [0], 0
    for time_s, change in changes:
        running += change
        times.append(time_s)
        counts.append(running)
    panel.plot(times, counts, drawstyle="steps-post")  # type: ignore[attr-defined]
    panel.set(title="Requests that run", xlabel="s", ylim=(0, None))  # type: ignore[attr-defined]
