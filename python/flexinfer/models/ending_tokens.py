"""Tokens that end an answer, of a folder's or repository's generation_config.json.

config.json often has not all of them. What else that file advises is not the model's concern
(engine/generation_config.py): transformers, which would read all of it here, refuses a model for a
value that nobody uses, and names no file.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from flexinfer.checkpoints.folder import MODEL_FILES, check_json

if TYPE_CHECKING:
    from transformers import GenerationConfig


def read_ending_tokens(name: str) -> GenerationConfig | None:
    """With these alone; None where there is no such file. Raises UnsupportedModelError."""
    from transformers import GenerationConfig
    from transformers.utils.hub import cached_file

    try:
        path: str | None = cached_file(name, MODEL_FILES[0])
    except OSError:
        return None
    if path is None:
        return None
    check_json(os.path.dirname(path), MODEL_FILES)
    with open(path, encoding="utf-8") as file:
        return GenerationConfig(eos_token_id=json.load(file).get("eos_token_id"))
