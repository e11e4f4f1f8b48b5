"""PeftFolder: an adapter as PEFT saves it, checked against a model before its weights are read.

    adapter_config.json         rank, alpha, and what else it is made of
    adapter_model.safetensors   base_model.model.PATH.lora_A.weight [rank, in_features]
                                base_model.model.PATH.lora_B.weight [out_features, rank]

What changes an answer and is not known here is refused by its name.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from flexinfer.checkpoints.tensor_files import is_lfs_pointer
from flexinfer.errors import RequestError
from flexinfer.layers.adapters import LayerAdapters, LayerUpdate
from flexinfer.lora.expressions import Expressions
from flexinfer.lora.places import Places
from flexinfer.lora.targets import Targets

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
HARMLESS = {
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout",
    "fan_in_fan_out", "bias", "use_rslora", "init_lora_weights", "layers_to_transform",
    "layers_pattern", "rank_pattern", "alpha_pattern", "megatron_core", "runtime_config",
    "qalora_group_size", "eva_config", "ensure_weight_tying",
}  # fmt: skip
"""Fields that are honoured, or that training alone reads; any other must be off."""
MAX_CONFIG_BYTES = 1 << 20
"""Some 10 kB are usual, and 100 kB with a rank for each layer."""
KEEPS_BASE = {"true", "false", "gaussian", "eva", "orthogonal"}
"""Ways to begin a training that leave the model's own weights as they are."""
DTYPES = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}
"""Of weights: integers mean nothing without their scales."""
NAME = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)\.weight")

Updates = list[tuple[LayerAdapters, LayerUpdate]]


class PeftFolder:
    """One adapter on disk. Raises RequestError for what cannot be served with this model."""

    def __init__(self, name: str, path: str, places: Places, max_rank: int) -> None:
        """Reads the config and the header of the weights."""
        self._who = f"LoRA adapter {name!r} ({path})"
        self._weights = Path(path) / WEIGHTS
        text = self._read_config(Path(path))
        self._config: dict[str, Any] = json.loads(text)
        self._places = places
        self._check_config()
        self._expressions = self._match_expressions()
        self._shapes = self._read_shapes()
        self._paths = self._check_tensors(max_rank)
        self._text = text

    def read(self) -> tuple[str, Updates]:
        """The digest of config and weights, by which equal adapters are known, and the adapter's
        part in each layer that has one. The weights are read once: both are of the same bytes,
        whatever becomes of the file meanwhile."""
        data = self._read_weights()
        digest = hashlib.blake2b(self._text, digest_size=16)
        digest.update(data)
        return digest.hexdigest(), self._updates(self._tensors_of(data))

    def _read_weights(self) -> bytes:
        try:
            return self._weights.read_bytes()
        except OSError as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: Exception) -> RequestError:
        why = str(error)
        with suppress(OSError):
            if is_lfs_pointer(self._weights):
                why = "it is a git-LFS pointer: fetch the weights by `git lfs pull`"
        return RequestError(f"{self._who}: {WEIGHTS} cannot be read: {why}")

    def _tensors_of(self, data: bytes) -> dict[str, torch.Tensor]:
        """Refuses what is not what was checked."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            tensors = load(data)
        except SafetensorError as error:
            raise self._unreadable(error) from None
        shapes = {n: tuple(part.shape) for n, part in tensors.items() if part.is_floating_point()}
        if shapes != self._shapes:
            raise RequestError(f"{self._who}: {WEIGHTS} has changed while it was read: ask again")
        return tensors

    def _updates(self, tensors: dict[str, torch.Tensor]) -> Updates:
        """Takes the tensors out of the dictionary, so that none is held twice."""
        parts: dict[int, list[tuple[int, torch.Tensor, torch.Tensor]]] = {}
        layers: dict[int, LayerAdapters] = {}
        for path in self._paths:
            place = self._places[path]
            a, b = (tensors.pop(_tensor(path, which)) for which in "AB")
            b = b.float() * self._scaling(path, a.shape[0])
            a, b = a.to(place.dtype), b.to(place.dtype)
            if not (a.isfinite().all() and b.isfinite().all()):
                raise RequestError(
                    f"{self._who} has weights of {path} that are no finite numbers in the "
                    f"model's {str(place.dtype).removeprefix('torch.')}"
                )
            layers[id(place.adapters)] = place.adapters
            parts.setdefault(id(place.adapters), []).append((place.first, a, b))
        return [(layers[key], LayerUpdate.of(of_layer)) for key, of_layer in parts.items()]

    def _read_config(self, folder: Path) -> bytes:
        """Of regular files alone: reading another kind may block or never end."""
        config = folder / CONFIG
        try:
            if not folder.is_dir():
                raise RequestError(f"{self._who}: there is no such folder")
            if not self._weights.is_file():
                why = "; save the adapter with safetensors" if list(folder.glob("*.bin")) else ""
                raise RequestError(f"{self._who} has no file {WEIGHTS}{why}")
            if not config.is_file():
                raise RequestError(f"{self._who} has no file {CONFIG}")
            with config.open("rb") as file:
                text = file.read(MAX_CONFIG_BYTES + 1)
        except OSError as error:  # a name that is too long, for one
            raise RequestError(f"{self._who} cannot be read: {error.strerror}") from None
        if len(text) > MAX_CONFIG_BYTES:
            raise RequestError(f"{self._who}: {CONFIG} has more than {MAX_CONFIG_BYTES} bytes")
        try:
            is_mapping = isinstance(json.loads(text), dict)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{self._who}: {CONFIG} cannot be read: {error}") from None
        if not is_mapping:
            raise RequestError(f"{self._who}: {CONFIG} is not a mapping")
        return text

    def _check_config(self) -> None:
        config = self._config
        for field, known in (("peft_type", ("LORA",)), ("task_type", ("CAUSAL_LM", None))):
            if config.get(field) not in known:
                raise RequestError(
                    f"{self._who} has {field} {config.get(field)!r}: only {known[0]} is supported"
                )
        if config.get("bias", "none") != "none":
            raise RequestError(f"{self._who} has bias={config['bias']!r}: biases are not supported")
        begun = config.get("init_lora_weights", True)
        if str(begun).lower() not in KEEPS_BASE:
            raise RequestError(
                f"{self._who} has init_lora_weights={begun!r}, by which the model's own weights "
                "may have changed, too: not supported; let PEFT convert it when it is saved"
            )
        unknown = [f for f, value in config.items() if value and f not in HARMLESS]
        if unknown:
            raise RequestError(f"{self._who} has {', '.join(sorted(unknown))}: not supported")
        for field in ("r", "lora_alpha"):
            self._check_number(field, config.get(field))
        if not isinstance(by_root := config.get("use_rslora") or False, bool):
            raise RequestError(f"{self._who}: use_rslora must be true or false, got {by_root!r}")
        for field in ("rank_pattern", "alpha_pattern"):
            self._check_pattern(field, config.get(field) or {})
        patterns = config.get("layers_pattern") or []
        of_list = patterns if isinstance(patterns, list) else [patterns]
        if not all(isinstance(pattern, str) for pattern in of_list):
            raise RequestError(
                f"{self._who}: layers_pattern must be an expression or a list of expressions, "
                f"got {patterns!r}"
            )

    def _check_pattern(self, field: str, patterns: Any) -> None:
        if not isinstance(patterns, dict):
            raise RequestError(f"{self._who}: {field} must be a mapping, got {patterns!r}")
        for pattern, value in patterns.items():
            self._check_number(f"{field} of {pattern!r}", value)

    def _match_expressions(self) -> Expressions:
        try:
            return Expressions(self._config, list(self._places))
        except ValueError as error:
            raise RequestError(f"{self._who}: {error}") from None

    def _check_number(self, field: str, value: Any) -> None:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 < value <= sys.float_info.max:
            raise RequestError(f"{self._who}: {field} must be a positive number, got {value!r}")

    def _check_tensors(self, max_rank: int) -> list[str]:
        """Paths of the layers that it has products for."""
        shapes = self._shapes
        paths = dict.fromkeys(found[1] for name in shapes if (found := NAME.fullmatch(name)))
        others = [name for name in shapes if not NAME.fullmatch(name)]
        if others:
            raise RequestError(f"{self._who} has the weights {others[0]!r}: not supported")
        if not paths:
            raise RequestError(f"{self._who} has no weights")
        for path in paths:
            self._check_path(path)
            a, b = (shapes.get(_tensor(path, which), ()) for which in "AB")
            if len(a) != 2 or len(b) != 2 or a[0] != b[1] or a[0] == 0:
                raise RequestError(f"{self._who}: lora_A {a} and lora_B {b} of {path} do not fit")
            place = self._places[path]
            if (b[0], a[1]) != (place.width, place.depth):
                raise self._of_another_model(
                    f"{path} has {a[1]} inputs and {b[0]} outputs in it, and {place.depth} and "
                    f"{place.width} in the model"
                )
            if a[0] > max_rank:
                raise RequestError(
                    f"{self._who} has rank {a[0]}, and max_lora_rank is {max_rank}: raise it"
                )
            rank = self._value("rank_pattern", path, self._config["r"])
            if a[0] != rank:
                raise RequestError(
                    f"{self._who} has rank {a[0]} in {path}, and {rank} by its {CONFIG}"
                )
        self._check_targets(paths)
        return list(paths)

    def _read_shapes(self) -> dict[str, tuple[int, ...]]:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self._weights, framework="pt") as file:
                parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                dtypes = {name: part.get_dtype() for name, part in parts.items()}
                shapes = {name: tuple(part.get_shape()) for name, part in parts.items()}
        except (OSError, SafetensorError) as error:
            raise self._unreadable(error) from None
        for name, dtype in dtypes.items():
            if dtype not in DTYPES:
                raise RequestError(
                    f"{self._who}: {name} is {dtype}; known: {', '.join(sorted(DTYPES))}"
                )
        return shapes

    def _check_path(self, path: str) -> None:
        if path in self._places:
            return
        if path in self._places.others:
            raise RequestError(
                f"{self._who} adapts {path}: only linear layers that compute each token once are "
                "supported, and no embedding, head or expert"
            )
        raise self._of_another_model(f"the model has no {path}")

    def _check_targets(self, paths: Mapping[str, Any]) -> None:
        """Refuse weights that lack one of the layers that the config names, or have others."""
        targets = Targets(self._config, self._expressions)
        for path in self._places:
            if path not in paths and targets.requires(path):
                raise RequestError(f"{self._who} is incomplete: it has no weights for {path}")
        others = [path for path in paths if path not in targets]
        if others:
            more = f" and {len(others) - 1} other layers" if len(others) > 1 else ""
            raise RequestError(
                f"{self._who} has weights of {others[0]}{more}, which its {CONFIG} does not choose "
                f"({targets}): PEFT would leave them out in silence"
            )

    def _of_another_model(self, why: str) -> RequestError:
        base = self._config.get("base_model_name_or_path")
        made_for = f" ({base!r})" if base else ""
        return RequestError(f"{self._who} is for another model{made_for}: {why}")

    def _scaling(self, path: str, rank: int) -> float:
        """As PEFT has it."""
        alpha = self._value("alpha_pattern", path, self._config["lora_alpha"])
        return float(alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank))

    def _value(self, field: str, path: str, default: float) -> float:
        """Of the first pattern that names this layer by the end of its path."""
        for pattern, value in (self._config.get(field) or {}).items():
            if path in self._expressions.found(field, pattern):
                return float(value)
        return default


def _tensor(path: str, which: str) -> str:
    return f"base_model.model.{path}.lora_{which}.weight"
