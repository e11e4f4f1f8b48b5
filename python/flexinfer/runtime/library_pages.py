"""Library pages: letting go of the code that only loading has run.

Of torch's libraries some 80 MiB of pages are touched by importing them and by what loading calls,
and never again. They are pages of files: the system reads them again, or still has them, whenever
one is needed; until then it may give their memory to somebody else.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \S+\s*(.*)")
LIBRARY = re.compile(r"\.so(\.[0-9.]+)?$")


@dataclass
class Mapping:
    """A line of /proc/self/smaps and what is said below it."""

    start: int
    end: int
    permissions: str
    path: str
    kib: dict[str, int] = field(default_factory=dict)

    @property
    def is_as_in_its_library(self) -> bool:
        """Whether no page of it has been written since, nor can be, nor is held on purpose:
        pages with the loader's relocations in them would be lost."""
        is_library = LIBRARY.search(self.path) is not None
        is_clean = not self.kib.get("Anonymous", 1) and not self.kib.get("Locked", 1)
        return is_library and self.permissions[1] == "-" and self.permissions[3] == "p" and is_clean


def let_go_of_library_pages() -> int:
    """Take the pages of libraries out of this process's resident set; returns bytes. The next call
    of a function maps its pages again, sixteen at a time.

    Nothing happens where there is no /proc/self/smaps.
    """
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    num_bytes = 0
    for mapping in _mappings():
        if not mapping.is_as_in_its_library:
            continue
        length = mapping.end - mapping.start
        if libc.madvise(mapping.start, length, mmap.MADV_DONTNEED) == 0:
            num_bytes += mapping.kib["Rss"] * 1024
    return num_bytes


def _mappings(smaps: Path = Path("/proc/self/smaps")) -> Iterator[Mapping]:
    try:
        lines = smaps.read_text().splitlines()
    except OSError:
        return
    mapping = None
    for line in lines:
        if (found := MAPPING.fullmatch(line)) is not None:
            if mapping is not None:
                yield mapping
            start, end, permissions, path = found.groups()
            mapping = Mapping(int(start, 16), int(end, 16), permissions, path)
        elif mapping is not None and line.endswith(" kB"):
            name, number, _ = line.split()
            mapping.kib[name.rstrip(":")] = int(number)
    if mapping is not None:
        yield mapping
