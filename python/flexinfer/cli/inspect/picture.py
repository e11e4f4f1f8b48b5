"""The memory map as a picture: a row for each vTensor and prefix, a cell for each chunk.

Chunks that stand in the same rows have the same colour; grey ones stand in one row alone, and dots
are what a window has left. A prefix that continues another begins where its tokens do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexinfer.cli.inspect.report import MemoryReport
from flexinfer.cli.memory_map import group_chunks
from flexinfer.cli.terminal_text import one_row, size_text

OWN_COLOUR = (0.75, 0.75, 0.75)
MAX_LABEL_CHARS = 28


def draw_map(file: Path, report: MemoryReport) -> None:
    """Write `report` into a .png, .svg or .pdf file."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Rectangle

    rows = report.rows()
    starts = report.first_chunks()
    ends = [start + len(row.chunks) for row, start in zip(rows, starts, strict=True)]
    longest = max(ends, default=1)
    size = (min(6 + longest * 0.14, 24), 1.2 + max(len(rows), 1) * 0.3)
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    colours = _colours(report)
    for y, row in enumerate(rows):
        for x, chunk in enumerate(row.chunks, start=starts[y]):
            if chunk is None:
                axes.plot(x + 0.45, y, ".", color=OWN_COLOUR, markersize=2)
                continue
            cell = Rectangle((x, y - 0.4), 0.9, 0.8, color=colours[chunk], linewidth=0)
            axes.add_patch(cell)
    axes.set(
        xlim=(0, max(longest, 1)),
        ylim=(max(len(rows), 1) - 0.4, -0.6),
        xlabel=f"chunks of {size_text(report.chunk_bytes)}, in the order of tokens",
        title=(
            f"{size_text(report.stats['resident_bytes'])} resident, "
            f"{size_text(report.stats['shared_bytes'])} shared, "
            f"{size_text(report.stats['saved_bytes'])} saved by sharing"
        ),
    )
    axes.set_yticks(range(len(rows)), [one_row(row.label)[:MAX_LABEL_CHARS] for row in rows])
    axes.spines[:].set_visible(False)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _colours(report: MemoryReport) -> dict[int, Any]:
    """Chunk -> colour of its group."""
    from matplotlib import colormaps

    palette = colormaps["tab20"].colors  # type: ignore[attr-defined]
    colours: dict[int, Any] = {}
    shared = 0
    for group in group_chunks(report.rows()):
        colour = OWN_COLOUR
        if group.is_shared:
            colour = palette[shared % len(palette)]
            shared += 1
        colours.update(dict.fromkeys(group.chunks, colour))
    return colours
