"""Arguments of vLLM's LLM and EngineArgs that EngineConfig does not have: what becomes of each.

A program written for vLLM passes them. What changes no answer is passed over, and the log says so;
what asks for what there is anyway is dropped; the rest is refused by its name, with what to do.
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Collection, Mapping
from typing import Any

from flexinfer.runtime.numbers import flag
from flexinfer.runtime.vllm_names import (
    INSTEAD,
    OWN_NAMES,
    SAME_FIELDS,
    SAME_HERE,
    WITHOUT_EFFECT,
)

logger = logging.getLogger(__name__)


def translate(given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Those of `given` that are `known`, under their names here. Raises ValueError for what vLLM
    knows and nobody serves here, TypeError for a name that neither knows."""
    own = {OWN_NAMES.get(name, name): value for name, value in given.items()}
    others = {name: value for name, value in own.items() if name not in known}
    for name, value in others.items():
        if not is_known_to_vllm(name):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ": leave it out"
            raise TypeError(f"there is no argument {name!r} here{hint}")
        if not is_passed_over(name, value):
            asked = _fields_that_differ(name, value) or value
            raise ValueError(f"{name}={asked!r} is not served here: {INSTEAD[name]}")
    note_passed_over([name for name in others if name in WITHOUT_EFFECT])
    return {name: value for name, value in own.items() if name in known}


def is_known_to_vllm(name: str) -> bool:
    """Whether it is the name of a setting of vLLM's that there is not here."""
    return name in WITHOUT_EFFECT or name in INSTEAD


def is_passed_over(name: str, value: Any) -> bool:
    """Whether a setting that `is_known_to_vllm` changes nothing here; else see `advice`."""
    return name in WITHOUT_EFFECT or is_same_here(name, value)


def note_passed_over(names: Collection[str]) -> None:
    if names:
        logger.info("passed over, for they change no answer: %s", ", ".join(sorted(names)))


def advice(name: str) -> str | None:
    """What to do without an argument of vLLM's; None: of others there is nothing to say."""
    if name in WITHOUT_EFFECT:
        return "it changes no answer here: leave it out"
    return INSTEAD.get(name)


def note_remote_code(trust_remote_code: Any) -> None:
    """Raises ValueError for what is neither True nor False."""
    if flag("trust_remote_code", trust_remote_code):
        logger.warning(
            "trust_remote_code: no code of a model's repository is run here; the implementation "
            "is that of transformers"
        )


def is_same_here(name: str, value: Any) -> bool:
    """Whether the value of an argument of vLLM's asks for what there is anyway."""
    if name not in INSTEAD:
        return False
    says_nothing = _says_nothing(value) or value in SAME_HERE.get(name, ())
    return says_nothing or _fields_that_differ(name, value) == {}


def _says_nothing(value: Any) -> bool:
    return value is None or value is False or value in (0, "", [], {}, (), frozenset())


def _fields_that_differ(name: str, value: Any) -> dict[str, Any] | None:
    """Of a mapping, or of its JSON, those that ask for something else; None: it is neither."""
    if name not in SAME_FIELDS:
        return None
    try:
        fields = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return None
    if not isinstance(fields, Mapping):
        return None
    same = SAME_FIELDS[name]
    return {
        field: one
        for field, one in fields.items()
        if not (_says_nothing(one) or one in same.get(field, ()))
    }
