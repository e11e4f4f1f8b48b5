"""LatentKV: multi-head latent attention (DeepSeek-V2, section 2.1) on the latents themselves.

A layer of this kind makes one narrow row per token, the latent c and a rotary key r, and expands it
to keys [W_k c, r] and values W_v c of all heads. What is cached here is [c, r], one KV head, whose
values are a part of its keys; both projections are absorbed by what meets them:

    score = [q, p] . [W_k c, r] = [W_k^T q, p] . [c, r]        output = sum w W_v c = W_v (sum w c)
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch


class LatentKV:
    """Takes the place of a layer's `expand_kv`, for the engine alone: elsewhere it expands."""

    def __init__(self, module: Any, implementations: Collection[str]) -> None:
        """`implementations`: names of attention functions that fold queries and unfold outputs."""
        self._module = module
        self._implementations = implementations
        self._width: int = module.kv_lora_rank
        self._query_width: int = module.qk_nope_head_dim
        self.weight: torch.Tensor = module.kv_b_proj.weight.detach()
        heads = self.weight.view(-1, module.qk_nope_head_dim + module.v_head_dim, self._width)
        self._to_keys = heads[:, : self._query_width]
        self._to_values = heads[:, self._query_width :].transpose(1, 2)

    def __call__(
        self, latent: torch.Tensor, rotary_key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """latent, rotary_key: [1, 1, tokens, width]. Returns keys and values, [1, 1, tokens, ...];
        the values are a view of the keys."""
        if self._module.config._attn_implementation not in self._implementations:
            module = self._module
            expanded: tuple[torch.Tensor, torch.Tensor] = type(module).expand_kv(
                module, latent, rotary_key
            )
            return expanded
        key = torch.cat((latent, rotary_key), dim=-1)
        return key, key[..., : self._width]

    def fold(self, query: torch.Tensor) -> torch.Tensor:
        """[1, heads, tokens, query width] to what meets latents: [1, heads, tokens, key width]."""
        plain, rotary = query.tensor_split((self._query_width,), dim=-1)
        return torch.cat((torch.matmul(plain, self._to_keys), rotary), dim=-1)

    def unfold(self, output: torch.Tensor) -> torch.Tensor:
        """[1, tokens, heads, latent width] to [1, tokens, heads, value width]."""
        return torch.matmul(output.transpose(1, 2), self._to_values).transpose(1, 2)


def latent_of(module: torch.nn.Module) -> LatentKV | None:
    """The module's, if it has one."""
    found = module.__dict__.get("expand_kv")
    return found if isinstance(found, LatentKV) else None


def keep_latents(model: torch.nn.Module, implementations: Collection[str]) -> None:
    """Have the layers that can do so keep latents, under these attention functions. Others, such as
    those whose weights are quantised or not read yet, stay as they are: they keep the expanded K
    and V."""
    for module in model.modules():
        projection: Any = getattr(module, "kv_b_proj", None)
        is_plain = type(projection) is torch.nn.Linear and projection.bias is None
        is_there = is_plain and not projection.weight.is_meta  # else it is read a layer at a time
        if is_there and hasattr(type(module), "expand_kv"):
            module.__dict__["expand_kv"] = LatentKV(module, implementations)
