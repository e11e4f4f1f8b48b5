"""Heads that are tied to the embedding: both read one weight, which lies in panels.

Most small models have one: of Qwen3 0.6B the head is a quarter of what a decode step reads. The
head's product wants panels (`host_linear.py`), in which the numbers of one token stand a cache line
apart. Looking them up takes 3 to 6 us a token of width 1,024 (by hand, one core of a Zen 5), where
a copy would take as much memory as the head. A quantised head gives its embedding rows in the same
way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from flexinfer.layers import host_linear
from flexinfer.layers.embedding import QuantisedEmbedding, is_embedding, scale_of
from flexinfer.layers.formats import make_linear
from flexinfer.layers.host_linear import HostLinear
from flexinfer.layers.quantised_linear import QuantisedLinear
from flexinfer.layers.recognise import is_plain, modules_read_by
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


class Tie(NamedTuple):
    """A head and an embedding of one weight that nothing else reads: the paths of each."""

    heads: list[str]
    embeddings: list[str]


def find_ties(model: torch.nn.Module) -> list[Tie]:
    """Of a model as it was made, with its weights or without."""
    ties: list[Tie] = []
    read = {id(part) for module in model.modules() for part in modules_read_by(module)}
    for paths in _users(model):
        modules = {path: model.get_submodule(path) for path in paths}
        heads = [path for path, module in modules.items() if type(module) is torch.nn.Linear]
        embeddings = [path for path, module in modules.items() if is_embedding(module)]
        # Under several paths there may be one module.
        num_heads, num_embeddings = (
            len({id(modules[path]) for path in some}) for some in (heads, embeddings)
        )
        are_all = len(heads) + len(embeddings) == len(paths)
        is_read = any(id(module) in read for module in modules.values())
        if num_heads == num_embeddings == 1 and are_all and not is_read:
            ties.append(Tie(heads, embeddings))
    return ties


def fuse_tied_heads(model: torch.nn.Module, ties: Iterable[Tie]) -> Counter[str]:
    """Lay out each weight that a head and an embedding share, and nothing besides; tells how many
    modules of each class have come of it. Heads that are quantised by now give the embedding its
    rows, instead of numbers that it has for itself."""
    counts: Counter[str] = Counter()
    for tie in ties:
        head, embedding = map(model.get_submodule, (tie.heads[0], tie.embeddings[0]))
        own = [*embedding.parameters()]
        shared = _shared(head, embedding)
        if shared is None:
            continue
        for paths, module in zip(tie, shared, strict=True):
            if module not in (head, embedding):
                counts[type(module).__name__] += 1
            for path in paths:
                model.set_submodule(path, module)
        drop_pages(own)
    return counts


def _shared(head: torch.nn.Module, embedding: torch.nn.Module) -> tuple[Any, Any] | None:
    """Head and embedding over one weight; None: they stay."""
    scale = scale_of(embedding)
    if isinstance(head, QuantisedLinear):
        return head, QuantisedEmbedding(head.rows, head.dtype, scale)
    if type(head) is not torch.nn.Linear or not _can_share(head):
        return None
    if head.weight.data_ptr() != embedding.get_parameter("weight").data_ptr():
        return None
    panels = make_linear(head)
    assert isinstance(panels, HostLinear)
    shared = panels, PanelEmbedding(panels, scale)
    return shared if _compute_the_same((head, embedding), shared) else None


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
            users.setdefault(id(weight) if weight.is_meta else weight.data_ptr(), []).append(path)
    return list(users.values())


def _can_share(head: Any) -> bool:
    return host_linear.supports(head.weight) and is_plain(head)
