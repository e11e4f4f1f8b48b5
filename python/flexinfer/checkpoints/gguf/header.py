"""GgufHeader: what a GGUF file says before its weights, read in milliseconds.

The reader of the `gguf` package makes an array of each string: with a vocabulary of 128,256 it
takes many seconds and 600 MiB. This one walks past the vocabulary, and looks for tokens of a few
texts. Source: docs/gguf.md of the ggml project.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, BinaryIO

from flexinfer.errors import UnsupportedModelError
from flexinfer.runtime.reasons import reason_of

MAGIC = b"GGUF"
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
"""What a part of a model in several files is called, by llama-gguf-split."""
VERSIONS = (2, 3)
ALIGNMENT, DEFAULT_ALIGNMENT = "general.alignment", 32
UINT32, STRING, ARRAY = 4, 8, 9
NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""Value types that have a fixed size, as struct names them."""
TENSOR_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}
"""Of tensors, those that can be read here."""
OTHER_TYPES = {9: "Q8_1", 15: "Q8_K", 40: "NVFP4", 41: "Q1_0"}
BLOCKS = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "IQ4_NL": (32, 18),
    "MXFP4": (32, 17),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_XS": (256, 136),
    "IQ3_S": (256, 110),
    "IQ3_XXS": (256, 98),
    "IQ2_S": (256, 82),
    "IQ2_XS": (256, 74),
    "IQ2_XXS": (256, 66),
    "IQ1_M": (256, 56),
    "IQ1_S": (256, 50),
    "TQ2_0": (256, 66),
    "TQ1_0": (256, 54),
}
"""Numbers and bytes of a block."""


TOKENS = "tokenizer.ggml.tokens"
ENDS = {
    text.encode()
    for text in (
        "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>",
        "<end_of_turn>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|fim_pad|>", "<fim_pad>",
        "<|repo_name|>", "<reponame>", "<|file_sep|>", "<end_of_utterance>", "<EOT>",
        "<|return|>", "<|call|>", "<eos>", "<turn|>", "<|tool_response>",
    )
}  # fmt: skip
"""Tokens that end an answer, whatever else the file says: most name one of several. As llama.cpp
has them, for models that can be read here."""
END_LENGTHS = {len(text) for text in ENDS}
HARMONY, END_OF_MESSAGE = {b"<|return|>", b"<|call|>"}, b"<|end|>"
"""Where there are both of the former, the latter ends a message of several that an answer has."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies, and how."""

    type: str
    shape: tuple[int, ...]
    """Rows first."""
    path: str
    """Of the file that it is in."""
    offset: int
    """Bytes from the beginning of that file."""

    def part(self, index: int) -> GgufTensor:
        """One of the matrices of a tensor of three dimensions."""
        part = replace(self, shape=self.shape[1:])
        return replace(part, offset=self.offset + index * part.size_bytes)

    @property
    def row_bytes(self) -> int:
        numbers, num_bytes = BLOCKS[self.type]
        return self.shape[-1] // numbers * num_bytes

    @property
    def size_bytes(self) -> int:
        return prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    path: str
    """Of the file, or the first of a model's files."""
    metadata: dict[str, Any]
    """Of arrays of strings only how many there are."""
    tensors: dict[str, GgufTensor]
    end_ids: tuple[int, ...] = ()
    """Of tokens whose text, of ENDS, says that an answer ends."""
    inner_ids: tuple[int, ...] = ()
    """Of one whose text says so, and that does not end an answer of this model."""

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))


def has_header(path: str) -> bool:
    """Whether it is a GGUF file, whatever it is called."""
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_header(path: str) -> GgufHeader:
    """Of a model in one file, or in several, of which `path` is one. Raises UnsupportedModelError
    for a file that is none, is damaged or missing, or has tensors of a type that cannot be read,
    each by name."""
    with _refusing(path):
        return _read_header(tuple(_state_of(file) for file in _files_of(path)))


def read_texts(path: str, keys: Collection[str]) -> dict[str, list[str]]:
    """The arrays of strings of these keys, those that there are. Raises as `read_header`."""
    with _refusing(path):
        first = _files_of(path)[0]
        metadata = _read(first, os.stat(first).st_size, keys).metadata
    found = {key: metadata[key] for key in keys if isinstance(metadata.get(key), list)}
    return {key: texts for key, texts in found.items() if isinstance(next(iter(texts), ""), str)}


@contextmanager
def _refusing(path: str) -> Iterator[None]:
    """Failures of reading as UnsupportedModelError."""
    try:
        yield
    except UnsupportedModelError:
        raise
    except OSError as error:
        file = error.filename or path  # perhaps another part of it
        raise UnsupportedModelError(
            f"model file {file!r} cannot be read: {reason_of(error)}"
        ) from error
    except struct.error as error:
        raise UnsupportedModelError(
            f"{path!r} is a damaged GGUF file: it ends before its header does, as one that is cut "
            "off or still being downloaded; fetch it again"
        ) from error
    except (ValueError, TypeError, ArithmeticError) as error:
        raise UnsupportedModelError(f"{path!r} is a damaged GGUF file: {error}") from error


def _files_of(path: str) -> list[str]:
    """All parts of a model, of what is called as one of several."""
    match = PART.fullmatch(path)
    if match is None or not 1 <= int(match[2]) <= int(match[3]):
        return [path]
    return [f"{match[1]}-{number:05}-of-{match[3]}.gguf" for number in range(1, int(match[3]) + 1)]


def _state_of(file: str) -> tuple[str, int, int]:
    """Its path, time and size."""
    status = os.stat(file)
    return file, status.st_mtime_ns, status.st_size


@lru_cache(maxsize=2)
def _read_header(files: tuple[tuple[str, int, int], ...]) -> GgufHeader:
    paths = [path for path, _, _ in files]
    parts = []
    for number, (path, _, size_bytes) in enumerate(files):
        with _refusing(path):
            parts.append(_read(path, size_bytes))
            _check_part(parts[-1], number, paths)
    tensors: dict[str, GgufTensor] = {}
    for part in parts:
        if twice := sorted(tensors.keys() & part.tensors.keys()):
            raise ValueError(f"its parts have {twice[0]} twice")
        tensors |= part.tensors
    total = parts[0].metadata.get("split.tensors.count", len(tensors))
    if len(parts) > 1 and total != len(tensors):
        raise ValueError(f"its parts have {len(tensors)} tensors, and should have {total}")
    return replace(parts[0], tensors=tensors)


def _check_part(part: GgufHeader, number: int, paths: list[str]) -> None:
    """Raises UnsupportedModelError where it does not say that it is the one that its name says."""
    count = max(1, part.metadata.get("split.count", 1))
    found = part.metadata.get("split.no", 0)
    if count != len(paths) or found != number:
        raise UnsupportedModelError(
            f"{part.path!r} is part {found + 1} of {count} of a model: give it the name "
            f"NAME-{found + 1:05}-of-{count:05}.gguf, with the others beside it"
        )


def _read(path: str, size_bytes: int, wanted: Collection[str] = ()) -> GgufHeader:
    with open(path, "rb") as file:
        if file.read(4) != MAGIC:
            raise UnsupportedModelError(f"{path!r} is no GGUF file: it does not begin with 'GGUF'")
        return _Reader(path, file, size_bytes, wanted).header()


class _Reader:
    """Walks through a header; `_at` is how far."""

    def __init__(self, path: str, file: BinaryIO, size_bytes: int, wanted: Collection[str]) -> None:
        """wanted: keys of the arrays of strings that are kept."""
        self._path, self._size_bytes, self._wanted = path, size_bytes, wanted
        self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = len(MAGIC)
        self._ends: dict[bytes, int] = {}
        """Texts of ENDS -> tokens."""

    def header(self) -> GgufHeader:
        (version,) = self._take("I")
        if version not in VERSIONS:
            raise UnsupportedModelError(
                f"{self._path!r} is GGUF of version {version} (or of another byte order); known "
                f"are {' and '.join(map(str, VERSIONS))}"
            )
        num_tensors, num_values = self._take("QQ")
        metadata = self._metadata(num_values)
        infos = [self._tensor() for _ in range(num_tensors)]
        tensors = self._tensors(infos, metadata.get(ALIGNMENT, DEFAULT_ALIGNMENT))
        inner = [text for text in self._ends if text == END_OF_MESSAGE]
        inner_ids = [self._ends.pop(text) for text in inner if self._ends.keys() >= HARMONY]
        end_ids = tuple(self._ends.values())
        return GgufHeader(self._path, metadata, tensors, end_ids, tuple(inner_ids))

    def _metadata(self, num_values: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._text()
            (kind,) = self._take("I")
            if key in metadata:
                raise ValueError(f"it has {key} twice")
            if key == ALIGNMENT and kind != UINT32:
                raise ValueError(f"{key} is a value of type {kind}, not {UINT32}")
            metadata[key] = self._value(kind, key)
        return metadata

    def _tensors(
        self, infos: list[tuple[str, int, tuple[int, ...], int]], alignment: int
    ) -> dict[str, GgufTensor]:
        """Each begins where the one before it ends, as ggml's own reader asks too: with a damaged
        type or offset the numbers would be others, and nobody would see it."""
        if alignment.bit_count() != 1:
            raise ValueError(f"{ALIGNMENT} = {alignment} is no power of two")
        start = at = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, kind, shape, offset in infos:
            tensor = GgufTensor(self._type(name, kind), shape, self._path, start + offset)
            if name in tensors:
                raise ValueError(f"it has two tensors {name}")
            if 0 in shape:
                raise ValueError(f"{name} is {list(shape)}: of no numbers")
            if shape[-1] % BLOCKS[tensor.type][0]:
                raise ValueError(f"{name} has rows of {shape[-1]} in blocks of {tensor.type}")
            if tensor.offset != at:
                raise ValueError(
                    f"{name} is at {offset}, and the one before it ends at {at - start}"
                )
            if at + tensor.size_bytes > self._size_bytes:
                raise ValueError(
                    f"{name} ends beyond the file: it is cut off, or still being downloaded"
                )
            tensors[name] = tensor
            at += -(-tensor.size_bytes // alignment) * alignment
        return tensors

    def _type(self, name: str, kind: int) -> str:
        if kind not in TENSOR_TYPES:
            raise UnsupportedModelError(
                f"{self._path!r} has the tensor {name!r} of type {OTHER_TYPES.get(kind, kind)}, "
                f"which cannot be read here; known are {', '.join(TENSOR_TYPES.values())}"
            )
        return TENSOR_TYPES[kind]

    def _tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._text()
        (num_dims,) = self._take("I")
        shape = tuple(reversed(self._take(f"{num_dims}Q"))) or (1,)
        kind, offset = self._take("IQ")
        return name, kind, shape, offset

    def _value(self, kind: int, key: str) -> Any:
        if kind == STRING:
            return self._text()
        if kind != ARRAY:
            return self._take(NUMBERS[kind])[0] if kind in NUMBERS else self._unknown(kind)
        kind, count = self._take("IQ")
        if kind in NUMBERS:
            return list(self._take(f"{count}{NUMBERS[kind]}"))
        if kind != STRING:
            return self._unknown(kind)
        if key in self._wanted:
            return [self._text() for _ in range(count)]
        for index in range(count):
            (length,) = self._take("Q")
            self._at += length
            if key == TOKENS and length in END_LENGTHS and (text := self._before(length)) in ENDS:
                self._ends[text] = index
        return count

    def _before(self, length: int) -> bytes:
        return self._bytes[self._at - length : self._at]

    def _text(self) -> str:
        (length,) = self._take("Q")
        self._at += length
        return self._before(length).decode()

    def _take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + form, self._bytes, self._at)
        self._at += struct.calcsize("<" + form)
        return values

    def _unknown(self, kind: int) -> None:
        raise ValueError(f"a value of type {kind}")
