"""Expressions: the regular expressions of an adapter_config.json, matched with paths of layers as
PEFT does, by `re`.

One may backtrack for ever, and `re` holds the interpreter's lock meanwhile: every thread would
stand still, and none could stop it. So this file is also the program of a process that matches,
which the kernel ends after LIMIT_S. It starts in some 10 ms: it imports the standard library alone.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

LIMIT_S = 1.0
"""Of a processor's time, so that a busy machine refuses no adapter; for all that an adapter has."""
FORMS = {
    "target_modules": ("fullmatch", "{}"),
    "exclude_modules": ("fullmatch", "{}"),
    "layers_pattern": ("match", r"(?:^|.*?\.){}\.(?P<idx>\d+)\."),
    "rank_pattern": ("match", r"(.*\.)?({})$"),
    "alpha_pattern": ("match", r"(.*\.)?({})$"),
}
"""Fields, and what PEFT makes of an expression in them (peft/tuners/tuners_utils.py,
`check_target_module_exists`; peft/utils/other.py, `get_pattern_key`)."""


class Expressions:
    """What those of one config match."""

    def __init__(self, config: Mapping[str, Any], paths: list[str]) -> None:
        """Matches them all. Raises ValueError for one that does not compile or takes too long."""
        asked = list(_asked(config))
        self._found = dict(zip(asked, _match(asked, paths), strict=True)) if asked else {}

    def found(self, field: str, pattern: str) -> dict[str, str | None]:
        """Paths that this one matches, with the number of the layer if it says one."""
        return self._found[field, pattern]


def _asked(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Fields and expressions. REQUIRES: types that fit."""
    for field in FORMS:
        said = config.get(field) or ()
        if isinstance(said, str):
            yield field, said
        elif not field.endswith("_modules"):  # lists of these have names
            yield from ((field, pattern) for pattern in said)


def _match(asked: list[tuple[str, str]], paths: list[str]) -> list[dict[str, str | None]]:
    """What each of them has found, in a process of their own."""
    forms = [(how, form.replace("{}", p)) for f, p in asked for how, form in [FORMS[f]]]
    done = subprocess.run(
        [sys.executable, "-I", "-S", __file__],
        input=json.dumps([LIMIT_S, forms, paths]),
        capture_output=True,
        text=True,
    )
    answers = [json.loads(line) for line in done.stdout.split("\n")[:-1]]  # whole lines
    for (field, pattern), answer in zip(asked, answers, strict=False):
        if isinstance(answer, str):
            raise ValueError(f"{field} {pattern!r}: {answer}")
    if done.returncode == -signal.SIGPROF:
        field, pattern = asked[len(answers)]
        raise ValueError(
            f"{field} {pattern!r} takes longer than {LIMIT_S:g} s to match with the names of the "
            "model's layers: write it without repetitions within repetitions, or list the names"
        )
    done.check_returncode()
    return answers


def _main() -> None:
    """A line for each expression: what it has found, or why it does not compile."""
    limit_s, forms, paths = json.load(sys.stdin)
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    for how, expression in forms:
        try:
            match = getattr(re.compile(expression), how)
        except (re.error, OverflowError, RecursionError) as error:
            print(json.dumps(getattr(error, "msg", str(error))))
            return
        found = {path: match(path) for path in paths}
        numbers = {path: at.groupdict().get("idx") for path, at in found.items() if at}
        print(json.dumps(numbers), flush=True)


if __name__ == "__main__":
    _main()
