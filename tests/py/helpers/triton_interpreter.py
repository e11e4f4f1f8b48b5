"""Triton's interpreter (TRITON_INTERPRET=1) beside a newer numpy: kernels on the CPU."""

from __future__ import annotations

from contextlib import suppress
from typing import Any


def admit_numpy() -> None:
    """Triton 3.6 makes an index of an array of one element by `int()`, which numpy 2.5 refuses.

    To go when Triton's `_patch_lang_tensor` does without. Nothing happens without Triton.
    """
    with suppress(ImportError):
        from triton.runtime import interpreter

        before = interpreter._patch_lang_tensor

        def patch(tensor: Any, scope: Any) -> None:
            before(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        interpreter._patch_lang_tensor = patch
