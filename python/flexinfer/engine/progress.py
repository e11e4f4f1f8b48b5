"""The bar of a call's outputs, as vLLM's `use_tqdm` has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from flexinfer.outputs import RequestOutput

ShowsProgress = bool | Callable[..., Any]
"""Whether there is a bar, or what makes one, as tqdm does."""


def with_progress(
    outputs: Iterator[RequestOutput], total: int, use_tqdm: ShowsProgress
) -> Iterator[RequestOutput]:
    """The same outputs, with a bar of `total` if there is to be one."""
    if not use_tqdm:
        return outputs
    from tqdm.auto import tqdm

    make = use_tqdm if callable(use_tqdm) else tqdm
    bar: Iterator[RequestOutput] = make(outputs, total=total, desc="Processed prompts")
    return bar
