"""Reads a trace that :meth:`VTensorManager.start_trace` wrote; docs/tracing.md has the format.

A trace is read line by line, never as a whole. Whether it was cut off is known at once: a complete
file ends with an ``end`` record, which counts the lines before it.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flexinfer.errors import TraceError
from flexinfer.vtensor import KVGroup, KVSpec

__all__ = ["FORMAT", "VERSION", "TraceHeader", "TraceReader"]

FORMAT = "flexinfer-trace"
VERSION = 1
_TAIL_BYTES = 4096
_DTYPES = {4: "float32", 2: "float16", 1: "uint8"}

Record = dict[str, Any]


@dataclass(frozen=True)
class TraceHeader:
    """The manager that was traced, at the moment when its trace began.

    ``live``: vTensors alive already then, as ``[id, num_tokens, is_swapped]``.
    """

    driver: str
    spec: dict[str, Any]
    chunk_bytes: int
    num_planes: int
    max_requests: int
    memory_budget: int
    options: dict[str, Any]
    created: int
    recorded_tokens: int
    live: list[list[int]]

    def kv_spec(self, layers_per_plane: int | None = None) -> KVSpec:
        """The shape of the cache, in another layout if that is asked for."""
        told = self.spec
        if "groups" not in told:
            return KVSpec(
                told["num_layers"],
                told["num_kv_heads"],
                told["head_dim"],
                _DTYPES[told["element_bytes"]],
                told["max_seq_len"],
                layers_per_plane or told["layers_per_plane"],
            )
        groups = [
            KVGroup(
                tuple(group["layers"]),
                group["num_kv_heads"],
                group["key_dim"],
                group["value_dim"],
                _DTYPES[group["element_bytes"]],
                group["window"] or None,
                layers_per_plane or group["layers_per_plane"],
            )
            for group in told["groups"]
        ]
        return KVSpec.of_groups(groups, told["max_seq_len"])


class TraceReader:
    """The header and, by iteration, ``(line number, record)`` of every line after it.

    ``tokens`` lines are kept and not handed out; :meth:`tokens` looks them up. Raises TraceError
    for a file that is not a trace, is of another version, or was cut off, unless
    ``allow_truncated``: then it ends with the last whole line.
    """

    def __init__(self, path: str | os.PathLike[str], *, allow_truncated: bool = False) -> None:
        self.path = os.fspath(path)
        self.header = self._read_header()
        self.truncated = not self._has_end()
        if self.truncated and not allow_truncated:
            raise self._cut_off()
        self._tokens: dict[int, array[int]] = {}

    def tokens(self, record: Record) -> array[int]:
        """The token ids that ``record`` names."""
        return self._tokens[record["tokens"]]

    def __iter__(self) -> Iterator[tuple[int, Record]]:
        with open(self.path, encoding="utf-8", errors="surrogateescape") as file:
            next(file)
            for number, line in enumerate(file, start=2):
                if self.truncated and not line.endswith("\n"):
                    return
                record = self._parse(number, line)
                kind = record.get("k")
                if kind == "tokens":
                    self._tokens[record["n"]] = array("i", record["ids"])
                elif kind == "end":
                    self._check_end(number, record)
                    return
                elif kind in ("op", "call", "label"):
                    yield number, record
                else:
                    raise self.error(number, f"no record is of kind {kind!r}")

    def error(self, number: int, what: str) -> TraceError:
        """An error about line ``number``."""
        return TraceError(f"{self.path}, line {number}: {what}")

    def _parse(self, number: int, line: str) -> Record:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise self.error(number, "not a JSON object; the file is damaged")
        return record

    def _read_header(self) -> TraceHeader:
        with open(self.path, encoding="utf-8", errors="surrogateescape") as file:
            line = file.readline()
        if not line:
            raise self.error(1, "the file is empty; the header is missing")
        try:
            first = json.loads(line)
        except ValueError:
            first = None
        if not isinstance(first, dict) or first.get("format") != FORMAT:
            if not line.endswith("\n") and line.startswith('{"format"'):
                raise self.error(1, "cut off inside the header; nothing can be replayed")
            raise self.error(1, f"not a trace: its first line does not say {FORMAT!r}")
        if first.get("version") != VERSION:
            raise self.error(
                1, f"version {first.get('version')!r}, but only version {VERSION} is known here"
            )
        try:
            return TraceHeader(**first["manager"])
        except (KeyError, TypeError) as error:
            raise self.error(1, f"the header lacks or misnames a field: {error}") from None

    def _has_end(self) -> bool:
        with open(self.path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            tail = file.read()
        last = tail[:-1].rpartition(b"\n")[2]
        return tail.endswith(b"\n") and last.startswith(b'{"k":"end"')

    def _cut_off(self) -> TraceError:
        number, last = 0, b"\n"
        with open(self.path, "rb") as file:
            for number, last in enumerate(file, start=1):  # noqa: B007
                pass
        where = "cut off after this line" if last.endswith(b"\n") else "cut off inside this line"
        return self.error(
            number,
            f"{where}: the 'end' record is missing, the traced process may have been killed; "
            "allow_truncated=True (--allow-truncated) replays what is there",
        )

    def _check_end(self, number: int, record: Record) -> None:
        if record.get("lines") != number - 2:
            raise self.error(
                number, f"{record.get('lines')} records were written, but {number - 2} are here"
            )
