"""A YAML file with a command's options: its values stand in for the defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from flexinfer.cli.serve.vllm_line import is_unneeded, own_flag
from flexinfer.runtime.reasons import reason_of


def load_config_file(context: typer.Context, path: Path | None) -> Path | None:
    """Callback of --config, which must be eager. Keys are the flags, with - or _, without --."""
    if path is None:
        return None
    context.default_map = {**(context.default_map or {}), **read_config(context, path)}
    return path


def read_config(context: typer.Context, path: Path) -> dict[str, Any]:
    """Values by the names of the command's parameters. Raises BadParameter, naming the key."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {reason_of(error)}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise typer.BadParameter(f"{path} must hold options, one 'name: value' per line")
    names = _parameter_names(context)
    values = {}
    for key, value in content.items():
        name = names.get(own_flag(str(key)))
        if name is None and is_unneeded(str(key), value):
            continue
        if name is None:
            raise typer.BadParameter(f"{path} has {key!r}, which is not an option of this command")
        values[name] = [_text(one) for one in value] if isinstance(value, list) else _text(value)
    return values


def _text(value: Any) -> Any:
    """As on the command line, where a mapping is JSON."""
    return json.dumps(value) if isinstance(value, dict) else value


def _parameter_names(context: typer.Context) -> dict[str, str]:
    """Flag without dashes -> parameter name. A switch also goes by the name of its "on" flag."""
    return {
        flag.lstrip("-"): parameter.name or ""
        for parameter in context.command.params
        if parameter.name != "config"
        for flag in (*parameter.opts, parameter.name or "")
    }
