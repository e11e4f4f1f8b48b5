"""Whether a command could draw a picture, checked before it does its work."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from flexinfer.cli.errors import check_folder

_SUFFIXES = (".png", ".svg", ".pdf")


def check_can_plot(file: Path, option: str = "--plot") -> None:
    """Raises ValueError before any work if the picture could not be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            f"{option} needs matplotlib, which is not installed: pip install 'flexinfer[bench]'"
        )
    if file.suffix.lower() not in _SUFFIXES:
        raise ValueError(f"{option} writes {', '.join(_SUFFIXES)} files, not {str(file)!r}")
    check_folder(file, option)
