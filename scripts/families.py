#!/usr/bin/env python3
"""make families: docs/families.md, a table of which causal architectures of transformers run here.

    python scripts/families.py [MODEL_TYPE...]

A config with the architecture's own defaults is checked first; what passes is made tiny, with
random weights, and what the engine says for several prompts is compared with `generate`.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "families.md"
TABLE = "<!-- made by `make families`: not by hand -->"
sys.path.insert(0, str(ROOT / "tests" / "py"))


def main(model_types: list[str]) -> None:
    import transformers

    from helpers.every_architecture import MODEL_TYPES
    from helpers.family_trial import KINDS, count_sentences, kind_of, try_family

    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    verdicts = {}
    for model_type in model_types or MODEL_TYPES:
        verdicts[model_type] = try_family(model_type)
        print(f"{model_type}: {verdicts[model_type]}", flush=True)
    if not model_types:
        counts = Counter(kind_of(verdict) for verdict in verdicts.values())
        rows = [f"| {model_type} | {verdict} |" for model_type, verdict in verdicts.items()]
        text = PAGE.read_text().split(TABLE)[0]
        version = transformers.__version__
        lines = [
            f"{text}{TABLE}\n",
            count_sentences(counts, version),
            "| what | architectures |\n|---|---|",
            *(f"| {kind} | {counts[kind]} |" for kind in KINDS),
            "",
            "| architecture | |\n|---|---|",
            *rows,
        ]
        PAGE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
