"""The config that is read of a file of a tiny model which says something besides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexinfer.checkpoints.gguf.checkpoint import load_gguf_config
from helpers.gguf.files import Type, add_weights, finish, writer_of
from helpers.gguf.models import CONFIGS, same
from helpers.tiny_models import draw_model


def read_with(path: Path, name: str, settings: dict[str, Any] | None = None, **values: Any) -> Any:
    """settings: of the config. values: by the file's keys, "__" for "."; None: without this key."""
    config = CONFIGS[name]()
    model = draw_model(type(config)(**{**config.to_dict(), **(settings or {})}))
    writer = writer_of(path, model)
    adders = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in values.items():
        own = f"{writer.arch}.{key.replace('__', '.')}"
        writer.kv_data[0].pop(own, None)
        if value is not None:
            adders[type(value)](own, value)
    add_weights(writer, model, same(Type.F32))
    finish(writer)
    return load_gguf_config(str(path))
