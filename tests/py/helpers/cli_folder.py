"""A folder with a tiny random chat model and a script of its own, as --model takes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from helpers.tiny_models import CHAT_TEMPLATE, save_chat_model

SYSTEM_PROMPT = "You are a small and helpful test. " * 2
TALKS = [["My name is A.", "I like tea.", "Who am I?"], ["Hello!", "I am B.", "Tell me a story."]]


def make_folder(
    folder: Path, expect: str | None = None, chat_template: str | None = CHAT_TEMPLATE
) -> str:
    """`expect` must stand in the answer to the last turn of the first conversation."""
    name = save_chat_model(folder, chat_template)
    talks: list[list[dict[str, Any]]] = [[{"user": line} for line in talk] for talk in TALKS]
    talks[0][-1]["expect"] = expect
    script = {"system_prompt": SYSTEM_PROMPT, "conversations": talks}
    (folder / "demo.json").write_text(json.dumps(script), encoding="utf-8")
    return name
