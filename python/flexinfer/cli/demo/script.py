"""DemoScript: what the users of the demo say, and what the answers must contain."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from flexinfer.cli.settings import SHIPPED_MODEL


@dataclass(frozen=True)
class Line:
    """One user message; `expect`, if any, must stand in the answer."""

    user: str
    expect: str | None = None


@dataclass(frozen=True)
class DemoScript:
    """`conversations[i][t]` is what user i says in turn t."""

    system_prompt: str
    conversations: list[list[Line]]

    @property
    def num_turns(self) -> int:
        return max(map(len, self.conversations))


def load_script(folder: str, conversations: int, turns: int, seed: int) -> DemoScript:
    """The script of a model folder that has one (demo.json), else the shipped one.

    What the answers must contain counts only for the model that the script came with.
    Raises ValueError if it has not as many conversations or turns.
    """
    own = Path(folder) / "demo.json"
    path = own if own.is_file() else SHIPPED_MODEL / "demo.json"
    if not path.is_file():
        raise ValueError(f"the demo's conversations are not in {path}: the installation is broken")
    script = parse_script(path.read_text(encoding="utf-8"), checked=path == own)
    if not 1 <= conversations <= len(script.conversations):
        raise ValueError(
            f"{path} has {len(script.conversations)} conversations, not {conversations}"
        )
    if not 1 <= turns <= script.num_turns:
        raise ValueError(f"the conversations in {path} have {script.num_turns} turns, not {turns}")
    return cut(script, conversations, turns, seed)


def parse_script(text: str, *, checked: bool) -> DemoScript:
    """`text` is demo.json; `checked`: keep what the answers must contain."""
    content = json.loads(text)
    conversations = [
        [Line(turn["user"], turn.get("expect") if checked else None) for turn in turns]
        for turns in content["conversations"]
    ]
    return DemoScript(content["system_prompt"], conversations)


def cut(script: DemoScript, conversations: int, turns: int, seed: int) -> DemoScript:
    """Some conversations of a script: the first ones for seed 0, others for other seeds."""
    order = list(range(len(script.conversations)))
    if seed:
        random.Random(seed).shuffle(order)
    chosen = [script.conversations[idx][:turns] for idx in order[:conversations]]
    return DemoScript(script.system_prompt, chosen)
