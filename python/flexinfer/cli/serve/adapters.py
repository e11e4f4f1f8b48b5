"""What --lora-modules says: the adapters that a server has from its start.

sql=adapters/sql                                            NAME=FOLDER
{"name": "sql", "path": "adapters/sql"}                     as vLLM has it, with base_model_name
["sql=adapters/sql", {"name": "mail", "path": "a/mail"}]    several
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from flexinfer.server.lora_module_path import LoRAModulePath

FLAG = "--lora-modules"
FORMS = 'NAME=FOLDER or {"name": NAME, "path": FOLDER}'
KNOWN = {field.name for field in fields(LoRAModulePath)}
OF_EXPERTS = "is_3d_lora_weight"
"""How weights of experts are laid out, which no adapter may have here: false says nothing."""


def lora_modules(words: Sequence[str]) -> tuple[LoRAModulePath, ...]:
    """Raises ValueError, with the flag's name."""
    return tuple(module for text in _whole(words) for module in _modules(text))


def _whole(words: Sequence[str]) -> Iterator[str]:
    """The environment's words are cut at blanks, which JSON may have inside."""
    begun = ""
    for word in words:
        begun = f"{begun} {word}" if begun else word
        if _is_json(begun) and _parsed(begun) is None:
            continue
        yield begun
        begun = ""
    if begun:
        raise ValueError(f"{FLAG} {begun!r} is not JSON: it takes {FORMS}")


def _modules(text: str) -> Iterator[LoRAModulePath]:
    if not _is_json(text):
        yield _pair(text)
        return
    found = _parsed(text)
    for one in found if isinstance(found, list) else [found]:
        yield _object(one) if isinstance(one, dict) else _pair(one)


def _pair(given: Any) -> LoRAModulePath:
    name, _, folder = given.partition("=") if isinstance(given, str) else ("", "", "")
    if not name or not folder:
        raise ValueError(f"{FLAG} takes {FORMS}, got {given!r}")
    return LoRAModulePath(name, folder)


def _object(given: dict[str, Any]) -> LoRAModulePath:
    said = dict(given)
    if said.pop(OF_EXPERTS, False):
        raise ValueError(
            f"{FLAG} {given!r} has {OF_EXPERTS}: adapters of experts are not supported"
        )
    if not said.keys() <= KNOWN or not {"name", "path"} <= said.keys():
        raise ValueError(f"{FLAG} takes {', '.join(sorted(KNOWN))}, got {given!r}")
    try:
        return LoRAModulePath(**said)
    except ValueError as error:
        raise ValueError(f"{FLAG} {given!r}: {error}") from None


def _is_json(text: str) -> bool:
    return text.startswith(("{", "["))


def _parsed(text: str) -> Any:
    """None: it is no JSON, or not all of it."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
