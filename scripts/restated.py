"""Other servers' tests and ours: counts tests/restated/*.toml for docs/testing.md.

python scripts/restated.py            prints the table
python scripts/restated.py --write    puts it into docs/testing.md
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "restated"
TESTS = ROOT / "tests" / "py" / "server"
PAGE = ROOT / "docs" / "testing.md"
TABLE = re.compile(r"(?<=<!-- restated -->\n).*(?=<!-- end of restated -->)", re.DOTALL)


@dataclass
class Part:
    """What one suite asks of one endpoint."""

    suite: str
    endpoint: str
    held: list[tuple[str, str]] = field(default_factory=list)
    """Their test, and ours."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Their test, and the reason."""


def parts() -> list[Part]:
    found: dict[tuple[str, str], Part] = {}
    for path in sorted(FOLDER.glob("*.toml")):
        table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        for file in table["file"]:
            key = (table["suite"], file["endpoint"])
            part = found.setdefault(key, Part(*key))
            part.held += file.get("held", {}).items()
            reasons = file.get("left_out", {})
            part.left_out |= {f"{file['path']}::{name}": why for name, why in reasons.items()}
    return [found[key] for key in sorted(found)]


def table() -> str:
    lines = ["| suite | endpoint | its tests held | by tests of ours | left out |"]
    lines.append("|---|---|---|---|---|")
    total: Counter[str] = Counter()
    for part in parts():
        numbers = {"held": len(part.held), "left": len(part.left_out)}
        ours = len({test for _, test in part.held})
        total.update(numbers)
        lines.append(
            f"| {part.suite} | `{part.endpoint}` | {numbers['held']} | {ours} | {numbers['left']} |"
        )
    ours = len({test for part in parts() for _, test in part.held})
    lines.append(f"| all | | {total['held']} | {ours} | {total['left']} |")
    return "\n".join(lines).replace("`others`", "the others") + "\n"


if __name__ == "__main__":
    if "--write" in sys.argv:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(TABLE.sub(lambda _: table(), page), encoding="utf-8")
    else:
        print(table(), end="")
