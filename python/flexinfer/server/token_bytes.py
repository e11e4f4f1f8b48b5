"""TokenBytes: the bytes of a token, where its text alone is only a part of a character."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Of one tokenizer. Knows byte-level BPE (GPT-2's letters for bytes) and pieces as <0xE3>."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer

    def of(self, token_id: int, text: str) -> bytes:
        """`text`: the token as decoded alone, with replacement characters for what is cut."""
        if REPLACEMENT not in text or self._tokenizer is None:
            return text.encode()
        piece = str(self._tokenizer.convert_ids_to_tokens(token_id))
        if found := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(found[1], 16)])
        letters = _byte_of_letter()
        if all(letter in letters for letter in piece):
            return bytes(letters[letter] for letter in piece)
        return text.encode()


@cache
def _byte_of_letter() -> dict[str, int]:
    """GPT-2's table: bytes that print stand for themselves, the others for letters from U+0100."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    shifted = {chr(0x100 + index): byte for index, byte in enumerate(others)}
    return {chr(byte): byte for byte in plain} | shifted
