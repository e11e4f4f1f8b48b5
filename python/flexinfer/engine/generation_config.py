"""Generation config: how a model's makers advise to sample, and what the operator says instead.

It is looked for where `EngineConfig.generation_config` says: in the model's folder, repository or
GGUF file ("auto"), in another folder, or nowhere ("vllm"). As in vLLM, `do_sample` is passed over:
that a model is greedy by default is said by a temperature of 0.
"""

from __future__ import annotations

import json
import logging
import os
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flexinfer.checkpoints.folder import check_json
from flexinfer.errors import UnsupportedModelError
from flexinfer.sampling.defaults import LENGTH, NAMES, SamplingDefaults

if TYPE_CHECKING:
    from flexinfer.config import EngineConfig

logger = logging.getLogger(__name__)

FILE = "generation_config.json"
OF_MODEL, NONE = "auto", "vllm"
OF_GGUF = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
"""What llama.cpp's converter makes of a generation_config.json -> the name that it has there."""
ALL_OF_GGUF = "general.sampling."
WITHOUT_EFFECT = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "diversity_penalty": 0,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "exponential_decay_length_penalty": None,
    "guidance_scale": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": 0,
    "sequence_bias": None,
    "suppress_tokens": None,
    "top_h": None,
    "typical_p": 1,
}
"""What else transformers would heed -> the value with which it makes no difference there."""


def sampling_defaults(config: EngineConfig) -> SamplingDefaults:
    """What requests have for what they leave out, told in the log. Raises UnsupportedModelError
    for what the model's makers advise and no request may have, ValueError for a folder without."""
    overrides: Mapping[str, Any] = config.override_generation_config or {}  # type: ignore[assignment]
    place, advised = _advised(config)
    _tell_of_others(place, advised)
    # What is overridden is not looked at: that is a way out of a file with a fault.
    advised = {name: advised[name] for name in NAMES if name in advised and name not in overrides}
    try:
        SamplingDefaults.of(advised, is_limit=False)
    except ValueError as error:
        raise UnsupportedModelError(
            f"{place} advises what no request may ask for: {error}; override_generation_config "
            f"(--override-generation-config) replaces it, generation_config='vllm' "
            "(--generation-config vllm) passes over all of its advice"
        ) from None
    is_limit = config.generation_config not in (OF_MODEL, NONE) or LENGTH in overrides
    defaults = SamplingDefaults.of({**advised, **overrides}, is_limit=is_limit)
    if defaults:
        places = [place] * bool(advised) + ["override_generation_config"] * bool(overrides)
        logger.info("default sampling parameters: %s; from %s", defaults, " and ".join(places))
    return defaults


def _advised(config: EngineConfig) -> tuple[str, Mapping[str, Any]]:
    """Where it stands, and what it says: names of a generation_config.json."""
    from flexinfer.checkpoints.gguf.hub import gguf_file

    source = config.generation_config
    if source == NONE:
        return "", {}
    if source != OF_MODEL:
        path = os.path.join(source, FILE)
        if not os.path.isfile(path):
            raise ValueError(
                f"generation_config must be {OF_MODEL!r}, {NONE!r} or a folder with a {FILE}; "
                f"there is no {path!r}"
            )
        return _read(path)
    if not isinstance(config.model, (str, os.PathLike)):
        return _of_loaded(config.model)
    name = os.fspath(config.model)
    if (file := gguf_file(name)) is not None:
        return repr(file), _of_gguf(file)
    found = os.path.join(name, FILE) if os.path.isdir(name) else _of_hub(name)
    if found is None or not os.path.isfile(found):
        return "", {}
    return _read(found)


def _tell_of_others(place: str, advised: Mapping[str, Any]) -> None:
    others = [
        f"{name} {value!r}"
        for name, value in sorted(advised.items())
        if value and (name.startswith(ALL_OF_GGUF) or value != WITHOUT_EFFECT.get(name, value))
    ]
    if others:
        logger.warning("%s advises what is passed over here: %s", place, ", ".join(others))


def _read(path: str) -> tuple[str, Mapping[str, Any]]:
    check_json(os.path.dirname(path), (FILE,))
    with open(path, encoding="utf-8") as file:
        said: dict[str, Any] = json.load(file)
    return repr(path), said


def _of_hub(name: str) -> str | None:
    """Where a repository's file lies, which is fetched if it must; None: it has none."""
    from huggingface_hub import try_to_load_from_cache
    from transformers.utils.hub import cached_file

    # That of the commit whose config was just read; a hub that is away is not waited for again.
    known = try_to_load_from_cache(name, FILE)
    if known is not None:
        return known if isinstance(known, str) else None
    try:
        found: str | None = cached_file(name, FILE)
    except OSError:
        return None
    return found


def _of_loaded(model: Any) -> tuple[str, Mapping[str, Any]]:
    said = getattr(model, "generation_config", None)
    # What differs from transformers' own defaults: these are nobody's advice.
    return "the loaded model's generation_config", {} if said is None else said.to_diff_dict()


def _of_gguf(path: str) -> dict[str, Any]:
    from flexinfer.checkpoints.gguf.header import read_header

    metadata = read_header(path).metadata
    advised = {key: value for key, value in metadata.items() if key.startswith(ALL_OF_GGUF)}
    return {OF_GGUF.get(key, key): _as_written(value) for key, value in advised.items()}


def _as_written(value: Any) -> Any:
    """0.6 for a float32 of 0.60000002: the file has no more digits, and people wrote fewer."""
    if not isinstance(value, float):
        return value
    short = float(f"{value:.6g}")
    return short if struct.pack("<f", short) == struct.pack("<f", value) else value
