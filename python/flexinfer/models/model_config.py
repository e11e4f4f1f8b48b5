"""The config of a model: read from its folder, the hub or its GGUF file, changed where the user
wants it (`hf_overrides`), and checked before any weight is read."""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flexinfer.errors import UnsupportedModelError
from flexinfer.models.checks import check_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

READ_ENDINGS = (".json", ".safetensors", ".jinja", ".model", ".txt")
"""Of the files in a model's folder that it may need."""
Overrides = Mapping[str, Any]


def resolve_config(model: Any, overrides: Overrides | None = None) -> Any:
    """The config of a path, a hub id or a loaded model, checked. Reads no weights.

    Raises UnsupportedModelError for a model that cannot be served, ValueError for `overrides` that
    it does not have.
    """
    if isinstance(model, (str, os.PathLike)):
        config = load_config(os.fspath(model))
        if overrides:
            config = _overridden(config, overrides)
        check_config(config)
    else:
        if overrides:
            raise ValueError("hf_overrides is for a path or hub id; the model given is loaded")
        config = _require_model(model).config
        check_config(config, type(model))
    return config


def load_config(name: str) -> Any:
    """The config of a local folder or hub id; a clear error if there is none."""
    from transformers import AutoConfig

    from flexinfer.checkpoints.folder import MODEL_FILES, check_folder, check_json
    from flexinfer.checkpoints.gguf.checkpoint import load_gguf_config
    from flexinfer.checkpoints.gguf.hub import files_hint, gguf_file

    _check_readable(name)
    if (file := gguf_file(name)) is not None:
        return load_gguf_config(file)
    check_folder("model", name)
    check_json(name, MODEL_FILES)
    if os.path.isdir(name) and not os.path.isfile(os.path.join(name, "config.json")):
        files = sorted(file for file in os.listdir(name) if file.endswith(".gguf"))
        hint = f"; it has GGUF files: name one, as {os.path.join(name, files[0])}" if files else ""
        raise UnsupportedModelError(f"model folder {name!r} has no config.json{hint}")
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason, hint = first_line(error).rstrip("."), files_hint(name)
        if "trust_remote_code" in str(error):
            reason = (
                "its type is none of transformers' own, and no code of a repository is run here"
            )
        raise UnsupportedModelError(f"model {name!r} cannot be loaded: {reason}{hint}") from error
    except Exception as error:  # of any kind: transformers trusts the types in a config.json
        raise unusable_config(name, error) from error


def _overridden(config: Any, overrides: Overrides) -> Any:
    """The config that there would be if config.json had these values; mappings are merged."""
    from transformers import CONFIG_MAPPING

    before = config.to_dict()
    values = _merged(before, _own_names(config, overrides))
    if unknown := [name for name in values if name not in before]:
        near = difflib.get_close_matches(unknown[0], before, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"hf_overrides: the model's config has no {unknown[0]!r}{hint}")
    if values["model_type"] not in CONFIG_MAPPING:
        raise ValueError(
            f"hf_overrides: model_type {values['model_type']!r} is none of transformers' own"
        )
    try:
        changed = CONFIG_MAPPING[values["model_type"]].from_dict(values)
    except Exception as error:  # of any kind: transformers trusts the types in a config.json
        raise ValueError(f"hf_overrides: {type(error).__name__}: {first_line(error)}") from error
    changed.name_or_path = config.name_or_path
    return changed


def _own_names(config: Any, overrides: Overrides) -> dict[str, Any]:
    """`overrides` under the names that the config has: transformers takes others, too, and some of
    them only where its own are not there."""
    named = {config.attribute_map.get(name, name): value for name, value in overrides.items()}
    if "torch_dtype" in named:
        named["dtype"] = named.pop("torch_dtype")
    rope = dict(named.pop("rope_scaling", None) or {})
    if "type" in rope:
        rope["rope_type"] = rope.pop("type")
    if "rope_theta" in named:
        rope["rope_theta"] = named.pop("rope_theta")
    if rope:
        named["rope_parameters"] = _merged(rope, named.get("rope_parameters") or {})
    _check_kinds_of_layers(getattr(config, "rope_parameters", None), named.get("rope_parameters"))
    return named


def _check_kinds_of_layers(own: Any, given: Any) -> None:
    """Raises ValueError for what is said of all layers where each kind has rope_parameters of its
    own: nobody reads it."""
    if not isinstance(own, Mapping) or not isinstance(given, Mapping):
        return
    kinds = [name for name, value in own.items() if isinstance(value, Mapping)]
    if kinds and (others := [name for name in given if name not in kinds]):
        raise ValueError(
            f"hf_overrides: the model's rope_parameters are those of {' and '.join(kinds)}: say "
            f'{{"rope_parameters": {{"{kinds[0]}": ...}}}} for {others[0]!r}'
        )


def _merged(values: Overrides, overrides: Overrides) -> dict[str, Any]:
    merged = dict(values)
    for name, value in overrides.items():
        before = merged.get(name)
        are_mappings = isinstance(before, Mapping) and isinstance(value, Mapping)
        merged[name] = _merged(before, value) if are_mappings else value  # type: ignore[arg-type]
    return merged


def _check_readable(name: str) -> None:
    """Raises UnsupportedModelError for what is there, and this user may not read: transformers
    calls a file of weights missing then, and does without a generation_config.json."""
    try:
        if os.path.isdir(name):
            with os.scandir(name) as entries:
                files = [e for e in entries if e.is_file() and e.name.endswith(READ_ENDINGS)]
            paths = sorted(file.path for file in files)
        else:
            paths = [name] * stat.S_ISREG(os.stat(name).st_mode)
        for path in paths:
            with open(path, "rb"):
                pass
    except PermissionError as error:
        raise UnsupportedModelError(
            f"model {name!r}: permission denied: this user may not read {error.filename!r}; check "
            "its permissions, and those of its folder"
        ) from None
    except OSError:  # a hub id, or a folder that is not there
        return


def _require_model(model: Any) -> PreTrainedModel:
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"model must be a path, a hub id or a transformers model, got {type(model).__name__}"
        )
    return model


def unusable_config(name: str, error: Exception) -> UnsupportedModelError:
    why = " ".join(f"{type(error).__name__}: {error}".split())
    return UnsupportedModelError(
        f"model {name!r} cannot be loaded: its config.json has a value that transformers cannot "
        f"use ({why})"
    )


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
