"""Folder: what a model's or tokenizer's must be, where transformers guesses or speaks of the hub.

All of it raises UnsupportedModelError, and passes over hub ids, whose files are not looked for.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from flexinfer.errors import UnsupportedModelError

MODEL_FILES = ("generation_config.json",)
TOKENIZER_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.json",
)
WEIGHTS_ENDING = ".safetensors"
"""Of no hub's repository."""


def check_folder(what: str, name: str) -> None:
    """Refuses a path, or what can only be one, at which there is no folder."""
    if os.path.isfile(name):
        raise UnsupportedModelError(
            f"{what} {name!r} is a file: name the folder that it stands in, "
            f"{os.path.dirname(name) or '.'!r}"
        )
    if name.lower().endswith(WEIGHTS_ENDING):
        raise UnsupportedModelError(
            f"{what} {name!r} does not exist; name the folder that its weights are to stand in"
        )
    looks_local = os.path.isabs(name) or name.startswith((".", "~")) or name.count("/") > 1
    if looks_local and not os.path.isdir(name):
        raise UnsupportedModelError(f"{what} folder {name!r} does not exist")


def check_json(folder: str, files: tuple[str, ...]) -> None:
    """Refuses those that are there and hold no JSON object: transformers passes over some."""
    for path in (Path(folder, file) for file in files):
        if not path.is_file():
            continue
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UnsupportedModelError(
                f"{str(path)!r} cannot be read as JSON: {error}; fetch it again"
            ) from None
        if not isinstance(content, dict):
            raise UnsupportedModelError(
                f"{str(path)!r} must hold a JSON object, not a {type(content).__name__}"
            )
