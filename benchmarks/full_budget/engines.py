"""The engines that are compared: ours, ours over pages, and transformers' continuous batching."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any
from unittest import mock

import torch
from contiguous import NotSupported
from paged_attention import (
    FLASH_PAGE_TOKENS,
    FlashPages,
    PagedAttention,
    PagedKernel,
    PlainPages,
    TorchPages,
    TritonPages,
)
from pages import PagedManager

from flexinfer import LLM, attention
from flexinfer.attention.base import AttentionBackend, LayerKV
from flexinfer.config import dtype_name
from flexinfer.engine import build
from flexinfer.vtensor import KVSpec

Backend = Callable[[list[LayerKV]], AttentionBackend]
MAX_ERROR = 3e-2
"""Of a kernel's trial, whose values are near 1; bfloat16 has 8 bits."""


@contextmanager
def open_ours(model: Any, backend: Backend | None = None, **settings: Any) -> Iterator[LLM]:
    """Our engine as it is, or with another attention."""
    with _given(backend=backend), closing(_open(model, **settings)) as llm:
        yield llm


@contextmanager
def open_paged(model: Any, kernel: PagedKernel, page_tokens: int, **settings: Any) -> Iterator[LLM]:
    """The same scheduler, runner and model over pages of that size."""
    managers: list[PagedManager] = []

    def make_manager(config: Any, loaded: Any, max_seq_len: int, memory: Any) -> PagedManager:
        shape = model.config
        head_dim = shape.hidden_size // shape.num_attention_heads
        spec = KVSpec(
            shape.num_hidden_layers,
            shape.num_key_value_heads,
            head_dim,
            dtype_name(loaded.dtype),
            max_seq_len,
        )
        managers.append(
            PagedManager(
                spec,
                loaded.device,
                loaded.dtype,
                max_requests=config.max_num_seqs,
                memory_budget=memory.budget_bytes,
                page_tokens=page_tokens,
            )
        )
        return managers[0]

    def backend(layers: list[LayerKV]) -> AttentionBackend:
        return PagedAttention(layers, managers[0], kernel)

    with _given(make_manager, backend), closing(_open(model, **settings)) as llm:
        yield llm


def _open(model: Any, **settings: Any) -> LLM:
    return LLM(model, device=model.device.type, skip_tokenizer_init=True, **settings)


@contextmanager
def _given(make_manager: Any = None, backend: Backend | None = None) -> Iterator[None]:
    """While an engine is built, these take the place of what it would choose."""
    create = attention.create
    with (
        mock.patch.object(build, "make_manager", make_manager or build.make_manager),
        mock.patch.object(
            attention,
            "create",
            lambda name, layers: backend(layers) if backend else create(name, layers),
        ),
    ):
        yield


def paged_kernels(device: torch.device, head_dim: int) -> tuple[list[tuple[PagedKernel, int]], Any]:
    """(kernel, page size) of what works here, the best first; and why others do not."""
    loads: list[tuple[str, Callable[[], PagedKernel], tuple[int, ...]]] = [
        ("flash-attn", FlashPages, (FLASH_PAGE_TOKENS,)),
        ("torch", TorchPages, (FLASH_PAGE_TOKENS,)),
        ("triton", lambda: TritonPages(device), (16, FLASH_PAGE_TOKENS)),
    ]
    if device.type == "cpu":
        loads = [("gather", lambda: PlainPages(device), (16,)), loads[-1]]
    found, reasons = [], {}
    for name, load, sizes in loads:
        try:
            kernel = load()
            error = max(try_kernel(kernel, device, head_dim, size) for size in sizes)
            if not error <= MAX_ERROR:
                raise NotSupported(f"gives wrong results here, off by {error:.2g}")
            found += [(kernel, size) for size in sizes]
        except Exception as error:  # a peer's failure is no fault, and is told
            reasons[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    return found, reasons


def try_kernel(kernel: PagedKernel, device: torch.device, head_dim: int, page_tokens: int) -> float:
    """Largest error, against gathered pages in float32, of two decodes and of a prompt's end."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        numbers = torch.empty(shape, device=device).uniform_(-1, 1, generator=generator)
        return numbers.to(torch.bfloat16)

    lengths = [page_tokens + 5, 3]
    size = (6, page_tokens, 2, head_dim)
    layer, q = LayerKV(draw(*size), draw(*size)), draw(5, 8, head_dim)
    table = torch.tensor([[4, 1], [3, 0]], dtype=torch.int32, device=device)
    ends = torch.tensor(lengths, dtype=torch.int32, device=device)
    found = [
        kernel.decode(q[:2], layer, table, ends, max(lengths)),
        kernel.prefixed(q, layer, table[:1], lengths[0]),
    ]
    cpu = torch.device("cpu")
    exact, exact_layer = PlainPages(cpu), LayerKV(layer.k.float().cpu(), layer.v.float().cpu())
    q, table = q.float().cpu(), table.cpu()
    expected = [
        exact.decode(q[:2], exact_layer, table, ends.cpu(), max(lengths)),
        exact.prefixed(q, exact_layer, table[:1], lengths[0]),
    ]
    pairs = zip(found, expected, strict=True)
    return max(float((one.float().cpu() - other).abs().max()) for one, other in pairs)
