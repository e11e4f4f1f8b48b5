"""Places: the linear layers of a model to whose outputs adapters may add, by transformers' names.

A layer is one of them if it computes all rows of a step, once, in their order: seen in a forward of
a few tokens. An expert, which computes the tokens that are routed to it, is none; nor is the head,
which computes those that are sampled, nor a layer of an indexer, which computes request by request.

Engines may share a model, and do not see each other's adapters: their numbers differ.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from flexinfer.layers.adapters import LayerAdapters
from flexinfer.layers.formats import is_linear
from flexinfer.layers.linear import Linear
from flexinfer.models.describe import LoadedModel, run_blind

NUM_PROBE_TOKENS = 5
NO_PLACES = (".experts.", ".indexer.")
"""Parts of paths of layers that compute other rows than those of a step, or request by request."""
_num_users: WeakKeyDictionary[Linear, int] = WeakKeyDictionary()
"""How many engines have the adapters of a layer in common."""
_lock = threading.Lock()
"""Of it: each engine may have a thread of its own."""


@dataclass(frozen=True, slots=True)
class Place:
    """Of one linear layer of the checkpoint."""

    adapters: LayerAdapters
    """Of the layer that computes it, maybe with others."""
    first: int
    """Of its outputs among that layer's."""
    width: int
    depth: int
    """Its inputs."""
    dtype: torch.dtype
    """Of its inputs and outputs."""


class Places:
    """All places of a model, which has them until `close`."""

    def __init__(self, loaded: LoadedModel | None) -> None:
        """loaded: None: there are none."""
        self._by_path: dict[str, Place] = {}
        self._undo: list[Callable[[], None]] = []
        self.others: set[str] = set()
        """Paths of modules, linear ones among them, that are no places."""
        if loaded is None:
            return
        model: Any = loaded.model
        self.others.update(name for name, _ in model.named_modules())
        modules = {path: module for path, module in model.named_modules() if _is_layer(module)}
        for path in [path for path in modules if path.rpartition(".layers.")[0] in modules]:
            del modules[path]  # a part of a `JoinedLinear`, whose outputs are adapted as a whole
        rows = _rows_seen(loaded, modules)
        for path, module in modules.items():
            if rows[path] == [NUM_PROBE_TOKENS] and not any(part in path for part in NO_PLACES):
                self._add(path, module, model)

    def __contains__(self, path: str) -> bool:
        return path in self._by_path

    def __getitem__(self, path: str) -> Place:
        return self._by_path[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_path)

    def close(self) -> None:
        """The model is as it was before."""
        while self._undo:
            self._undo.pop()()

    def _add(self, path: str, module: Any, model: Any) -> None:
        adapters = LayerAdapters()
        if isinstance(module, Linear):
            adapters = _share(module)
            self._undo.append(lambda: _give_back(module))
        else:
            hook = module.register_forward_hook(
                lambda _, given, output: adapters.add_to(output, given[0])
            )
            self._undo.append(hook.remove)
        parent, _, name = path.rpartition(".")
        joined = getattr(model.get_submodule(parent), "joined", {})
        parts = {part: at for part, at in joined.items() if at.name == name}
        (width, depth), dtype = _shape(module), module.weight.dtype
        self._by_path[path] = Place(adapters, 0, width, depth, dtype)
        for part, at in parts.items():
            place = Place(adapters, at.first, at.width, depth, dtype)
            self._by_path[f"{parent}.{part}"] = place
        if parts:
            del self._by_path[path]  # no checkpoint knows it
            self.others.discard(path)


def _share(module: Linear) -> LayerAdapters:
    """Its adapters, for one more engine."""
    with _lock:
        _num_users[module] = _num_users.get(module, 0) + 1
        if module.adapters is None:
            module.adapters = LayerAdapters()
        return module.adapters


def _give_back(module: Linear) -> None:
    """The last one leaves the layer as it was."""
    with _lock:
        _num_users[module] -= 1
        if not _num_users[module]:
            module.adapters = None


def _is_layer(module: Any) -> bool:
    return isinstance(module, Linear) or is_linear(module)


def _shape(module: Any) -> tuple[int, int]:
    """Outputs and inputs."""
    if hasattr(module, "out_features"):
        return module.out_features, module.in_features
    depth, width = module.weight.shape  # Conv1D
    return width, depth


@torch.inference_mode()
def _rows_seen(loaded: LoadedModel, modules: dict[str, Any]) -> dict[str, list[int]]:
    """How many rows each module computes in a forward of NUM_PROBE_TOKENS, call by call."""
    seen: dict[str, list[int]] = {path: [] for path in modules}

    def watch(path: str) -> Callable[..., None]:
        return lambda _, given: seen[path].append(given[0].numel() // given[0].shape[-1])

    with ExitStack() as hooks:
        for path, module in modules.items():
            hooks.callback(module.register_forward_pre_hook(watch(path)).remove)
        run_blind(loaded, torch.arange(NUM_PROBE_TOKENS, device=loaded.device), num_logits=1)
    return seen
