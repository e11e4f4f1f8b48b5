"""Heads that are tied to the embedding: both read one weight, which lies in panels.

Most small models have one: of Qwen3 0.6B the head is a quarter of what a decode step reads. The
head's product wants panels (`host_linear.py`), in which the numbers of one token stand a cache line
apart. Looking them up takes 3 to 6 us a token of width 1,024 (by hand, one core of a Zen 5), where
a copy would take as much memory as the head.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from flexinfer.layers import host_linear
from flexinfer.layers.formats import make_linear
from flexinfer.layers.host_linear import HostLinear
from flexinfer.layers.known import SCALED_EMBEDDINGS
from flexinfer.layers.recognise import is_known, is_watched
from flexinfer.layers.trial import computes_the_same
from flexinfer.runtime.weight_files import drop_pages


class PanelEmbedding(torch.nn.Module):
    """ids [...] -> [..., width]: the numbers of the head's weight, times a scale. Not for training.

    REQUIRES ids that the head has outputs for.
    """

    def __init__(self, head: HostLinear, scale: torch.Tensor | None) -> None:
        """scale: of one number, which is rounded to the weight's dtype; None: 1."""
        super().__init__()
        self.weight = torch.nn.Parameter(head.weight, requires_grad=False)
        """Opaque, but for its dtype and device: transformers asks a model's first parameter, and of
        some there is no other."""
        self.num_embeddings, self.embedding_dim = head.out_features, head.in_features
        self._columns = host_linear.panel_columns(head.dtype)
        self._scale = None if scale is None else scale.to(head.dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        panels, dtype = self.weight.data, self.weight.dtype
        if panels.dim() == 4:  # of bfloat16, two of a token's numbers side by side
            panels = panels.view(torch.int32).squeeze(-1)
        flat = ids.reshape(-1)
        rows = panels[flat // self._columns, :, flat % self._columns].view(dtype)
        rows = rows.view(*ids.shape, self.embedding_dim)
        return rows if self._scale is None else rows * self._scale

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


def fuse_tied_heads(model: torch.nn.Module) -> Counter[str]:
    """Lay out each weight that a linear layer and an embedding share, and nothing besides; tells
    how many modules of each class have come of it."""
    counts: Counter[str] = Counter()
    for paths in _users(model):
        modules = {id(module): module for module in map(model.get_submodule, paths)}
        heads = [m for m in modules.values() if type(m) is torch.nn.Linear]
        embeddings = [m for m in modules.values() if _is_embedding(m)]
        if not len(heads) == len(embeddings) == 1 == len(modules) - 1 or not _can_share(heads[0]):
            continue
        weight = heads[0].weight
        head = make_linear(heads[0])
        assert isinstance(head, HostLinear)
        embedding = PanelEmbedding(head, getattr(embeddings[0], "embed_scale", None))
        if not _compute_the_same((heads[0], embeddings[0]), (head, embedding)):
            continue
        for path in paths:
            is_head = model.get_submodule(path) is heads[0]
            model.set_submodule(path, head if is_head else embedding)
        drop_pages([weight])
        counts.update(type(part).__name__ for part in (head, embedding))
    return counts


@torch.inference_mode()
def _compute_the_same(own: tuple[Any, Any], fused: tuple[HostLinear, PanelEmbedding]) -> bool:
    """Heads and embeddings in a trial: of tokens that stand in the first and the last panels."""
    (own_head, own_embedding), (head, embedding) = own, fused
    last = head.out_features - 1
    ids = torch.tensor([[0, last // 2, last]])
    return torch.equal(embedding(ids), own_embedding(ids)) and computes_the_same(
        own_head, head, head.in_features, head.dtype
    )


def _users(model: torch.nn.Module) -> list[list[str]]:
    """The paths of the modules that use a weight, weight by weight."""
    users: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for weight in module.parameters(recurse=False):
            if not weight.is_meta:
                users.setdefault(weight.data_ptr(), []).append(path)
    return list(users.values())


def _can_share(head: Any) -> bool:
    return host_linear.supports(head.weight) and _is_plain(head)


def _is_embedding(module: Any) -> bool:
    """Whether it looks up rows of its weight, times its `embed_scale` where it has one."""
    if not isinstance(module, torch.nn.Embedding) or module.max_norm is not None:
        return False
    if type(module) is torch.nn.Embedding:
        return _is_plain(module)
    is_derived = type(module).__bases__ == (torch.nn.Embedding,)
    return is_derived and is_known(module, SCALED_EMBEDDINGS)


def _is_plain(module: torch.nn.Module) -> bool:
    return not is_watched(module) and "forward" not in vars(module)
