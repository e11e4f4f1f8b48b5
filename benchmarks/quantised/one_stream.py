"""How near a decode of one stream is to the speed of memory, by dtype and quantisation; see
README.md beside this file.

python benchmarks/quantised/one_stream.py --json FILE [--folder DIR] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

from model import SHAPES, make_folder
from provenance import write_report

WAYS = {
    "float32": ("--dtype", "float32"),
    "bfloat16": ("--dtype", "bfloat16"),
    "int8": ("--dtype", "bfloat16", "--quantization", "int8"),
    "int4": ("--dtype", "bfloat16", "--quantization", "int4"),
}
STEP = ("--requests", "1", "--prompt-tokens", "64", "--new-tokens", "64", "--roofline")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure each way in turn, print the medians, and write all rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--folder", type=Path, default=Path("build/quantised"), help="for models")
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args(argv)
    folder = make_folder(arguments.folder, arguments.shape, arguments.layers)
    load_before = os.getloadavg()
    rounds = [
        {way: measure(folder, options) for way, options in WAYS.items()}
        for _ in range(arguments.rounds)
    ]
    for way in WAYS:
        shares = [one[way]["decode_of_limit"] for one in rounds]
        step_ms = statistics.median(one[way]["decode_step_ms"] for one in rounds)
        print(f"{way}: {step_ms:.1f} ms, {statistics.median(shares):.0%} of the limit", shares)
    write_report(arguments.json, "one stream", {"rounds": rounds}, load_before=load_before)


def measure(folder: Path, options: Sequence[str]) -> dict[str, Any]:
    """What `flexinfer bench step` reports, in a process of its own."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "flexinfer.cli", "bench", "step", "--model", str(folder)]
        command += [*options, *STEP, "--json", file.name]
        subprocess.run(command, check=True, capture_output=True)
        found: dict[str, Any] = json.loads(Path(file.name).read_text())
        return found


if __name__ == "__main__":
    main()
