"""The options of `flexinfer demo`: one field each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from flexinfer.cli.option_model import option
from flexinfer.cli.settings import EngineSettings


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    conversations: Annotated[int, option("How many run together.", min=1)] = 4
    turns: Annotated[int, option("Turns of each conversation.", min=1)] = 6
    max_tokens: Annotated[int, option("Maximum number of tokens per answer.", min=1)] = 48
    plot: Annotated[
        Path | None, option("Draw memory over time into this file (.png, .svg, .pdf).")
    ] = None
    json: Annotated[Path | None, option("Write every number into this file.")] = None


@dataclass(frozen=True, kw_only=True)
class DemoSettings(EngineSettings, DemoOptions):
    """Everything that the command was given; the last base's fields come first in the help."""

    # With less precision rounding depends on the batch, and the two runs would differ.
    dtype: Annotated[str, option("float32, bfloat16, float16, or auto (the model's own).")] = (
        "float32"
    )

    @property
    def max_num_seqs(self) -> int:
        return self.conversations
