"""Operators for torch, which compiled models call in place of functions to look into."""

from __future__ import annotations

from collections.abc import Callable

import torch


def define_operators(
    *operators: tuple[str, Callable[..., object], Callable[..., object]],
) -> torch.library.Library:
    """Define flexinfer::NAME for each (schema, function, function that makes the output's shape).

    They live as long as the library that is returned; a name can be defined once a process.
    """
    library = torch.library.Library("flexinfer", "FRAGMENT")  # type: ignore[no-untyped-call]
    for schema, function, shape in operators:
        name = schema.partition("(")[0]
        library.define(schema)  # type: ignore[no-untyped-call]
        library.impl(name, function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"flexinfer::{name}", shape, lib=library)
    return library
