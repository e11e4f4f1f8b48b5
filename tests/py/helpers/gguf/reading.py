"""The config that is read of a file of a tiny model which says something besides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexinfer.checkpoints.gguf.checkpoint import load_gguf_config
from helpers.gguf.files import Type, writing
from helpers.gguf.form import replace_key
from helpers.gguf.models import CONFIGS, same
from helpers.tiny_models import draw_model


def read_with(path: Path, name: str, settings: dict[str, Any] | None = None, **values: Any) -> Any:
    """settings: of the config. values: by the file's keys, "__" for "."; None: without this key."""
    config = CONFIGS[name]()
    model = draw_model(type(config)(**{**config.to_dict(), **(settings or {})}))
    with writing(path, model, same(Type.F32)) as (writer, _):
        for key, value in values.items():
            replace_key(writer, key.replace("__", "."), value)
    return load_gguf_config(str(path))
