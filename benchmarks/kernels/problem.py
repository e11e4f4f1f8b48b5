"""What is computed: attention of some new tokens of each request over its KV, and its reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Shape:
    """One point of the grid. A decode has one new token a request, a prefill `new_tokens`."""

    batch: int
    seq_len: int
    """Tokens of each request, the new ones included."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    new_tokens: int = 1

    @property
    def phase(self) -> str:
        return "decode" if self.new_tokens == 1 else "prefill"

    def kv_bytes(self, element_bytes: int) -> int:
        """Bytes of K and V that must be read at least once."""
        tokens = self.batch * self.seq_len
        return 2 * tokens * self.num_kv_heads * self.head_dim * element_bytes

    @property
    def flops(self) -> int:
        """Multiplications and additions of QK and PV, with the causal half left out."""
        keys = self.seq_len - (self.new_tokens - 1) / 2
        return int(4 * self.batch * self.new_tokens * keys * self.num_heads * self.head_dim)


@dataclass(frozen=True)
class Problem:
    """KV where it stands, and the queries of the new tokens."""

    shape: Shape
    q: torch.Tensor
    """[batch, new_tokens, num_heads, head_dim]"""
    k: torch.Tensor
    """[batch, seq_len, num_kv_heads, head_dim], any strides but the last, which is 1."""
    v: torch.Tensor
    """As k. Request i stands in slot i."""

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def lengths(self) -> torch.Tensor:
        """[batch] int32."""
        shape = self.shape
        return torch.full((shape.batch,), shape.seq_len, dtype=torch.int32, device=self.device)

    def slots(self) -> torch.Tensor:
        """[batch] int32."""
        return torch.arange(self.shape.batch, dtype=torch.int32, device=self.device)


def make_queries(shape: Shape, dtype: torch.dtype, device: str) -> torch.Tensor:
    """[batch, new_tokens, num_heads, head_dim], random."""
    size = (shape.batch, shape.new_tokens, shape.num_heads, shape.head_dim)
    return torch.randn(size, dtype=torch.float32, device=device).to(dtype)


def reference(problem: Problem, request: int) -> torch.Tensor:
    """Attention of one request written out in float32: [new_tokens, num_heads, head_dim]."""
    shape = problem.shape
    q = problem.q[request].float().transpose(0, 1)
    k = problem.k[request, : shape.seq_len].float().transpose(0, 1)
    v = problem.v[request, : shape.seq_len].float().transpose(0, 1)
    group = shape.num_heads // shape.num_kv_heads
    k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
    scores = q @ k.transpose(1, 2) * shape.head_dim**-0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).tril(
        shape.seq_len - shape.new_tokens
    )
    scores = scores.masked_fill(~hidden, -torch.inf)
    return (scores.softmax(dim=-1) @ v).transpose(0, 1)


def error_of(problem: Problem, output: torch.Tensor, request: int) -> float:
    """Norm of the difference from the reference, relative; NaN stays NaN.

    output: [batch, new_tokens, num_heads, head_dim]
    """
    expected = reference(problem, request)
    return float((output[request].float() - expected).norm() / expected.norm())
