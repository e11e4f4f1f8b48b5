"""What callers pass to the core: tokens, lengths and layers, checked and as the core takes them."""

from __future__ import annotations

from array import array
from typing import Any


def token_array(tokens: Any) -> Any:
    """``tokens`` as a contiguous int32 buffer; buffers of int32 pass through without a copy."""
    if isinstance(tokens, array) and tokens.typecode == "i":
        return tokens
    if hasattr(tokens, "__dlpack__") or hasattr(tokens, "__array_interface__"):
        dtype = str(tokens.dtype)
        if dtype.endswith("int32") and not dtype.endswith("uint32"):
            return tokens
        tokens = tokens.tolist()
    try:
        return array("i", tokens)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"tokens must be integers that fit in 32 bits: {error}") from None


def check_length(num_tokens: int) -> int:
    if num_tokens < 0:
        raise ValueError(f"num_tokens must not be negative, got {num_tokens}")
    return num_tokens


def bad_lengths(num_tokens: Any) -> ValueError:
    return ValueError(f"num_tokens must be integers of at least 0, got {num_tokens!r}")


def check_layer(layer: int) -> int:
    if layer < 0:
        raise LookupError(f"layer must not be negative, got {layer}")
    return layer
