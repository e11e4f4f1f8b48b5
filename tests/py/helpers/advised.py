"""Folders with the shipped model, and a generation_config.json of a test's own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from flexinfer.cli.settings import SHIPPED_MODEL

FILE = "generation_config.json"


def advise(folder: Path, **said: Any) -> Path:
    """A file that says this, and nothing else of sampling. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(json.dumps({"eos_token_id": 2, **said}))
    return folder


def advised_model(folder: Path, **said: Any) -> Path:
    """The shipped model in a folder whose generation_config.json says this."""
    shutil.copytree(SHIPPED_MODEL, folder)
    return advise(folder, **said)
