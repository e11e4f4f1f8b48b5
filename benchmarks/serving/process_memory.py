"""PeakMemory: the most memory that this process and its children held, each page counted once.

    RSS      a page counts once for each mapping: a chunk that 32 requests share counts 32 times,
             one that a cache keeps without mapping it not at all
    PSS      a page counts 1 / (number of its mappings, in all processes): a chunk counts once, but
             a library counts less when another process has loaded it, too
    counted  anonymous memory as in PSS, pages of files as in RSS, shared memory as in PSS or what
    here     this process's memfds hold, whichever is more; children by their PSS. So it is what
             would be free if this process ended, whoever else runs

Linux only. A reading walks the page tables, 15 to 25 ms at 1.5 GiB of 4 KiB pages, in which this
process can map nothing: it belongs in a repetition that is not timed. Standard library only, as it
runs in each peer's Python.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType

MIB = 1 << 20


class PeakMemory:
    """Samples in a thread of its own while it is entered; `peak_bytes` is the most so far."""

    def __init__(self, interval_s: float = 0.1, proc: Path = Path("/proc/self")) -> None:
        self.peak_bytes = 0
        self._interval_s = interval_s
        self._proc = proc
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> PeakMemory:
        self._stop.clear()
        self._thread = threading.Thread(target=self._sample, name="peak-memory", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.see()

    def see(self) -> int:
        """Read once; returns the bytes held now."""
        num_bytes = memory_bytes(self._proc)
        self.peak_bytes = max(self.peak_bytes, num_bytes)
        return num_bytes

    def _sample(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.see()


def memory_bytes(proc: Path = Path("/proc/self")) -> int:
    """Bytes that a process and its children hold now, each page counted once."""
    parts = fields(proc / "smaps_rollup")
    files = fields(proc / "status").get("RssFile", 0)
    shared = max(parts.get("Pss_Shmem", 0), memfd_bytes(proc))
    own = parts.get("Pss_Anon", 0) + shared + files
    return own + sum(_tree_pss(child) for child in _children(proc))


def memfd_bytes(proc: Path = Path("/proc/self")) -> int:
    """What the system holds for the memfds that a process has open, mapped or not."""
    memfds = dict(filter(None, map(_memfd, (proc / "fd").iterdir())))
    return sum(memfds.values())


def _memfd(link: Path) -> tuple[int, int] | None:
    """(inode, bytes held); None: another kind of file, or closed meanwhile."""
    try:
        if not os.readlink(link).startswith("/memfd:"):
            return None
        status = link.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_blocks * 512


def peak_resident_bytes(proc: Path = Path("/proc/self")) -> int:
    """Peak RSS since the process started, its children left out."""
    return fields(proc / "status").get("VmHWM", 0)


def fields(file: Path) -> dict[str, int]:
    """The lines "name: number kB" of a file under /proc, in bytes; {} if its process has ended."""
    words = [line.split() for line in _read(file).splitlines() if line.endswith("kB")]
    return {name.rstrip(":"): int(number) * 1024 for name, number, _ in words}


def _tree_pss(proc: Path) -> int:
    return fields(proc / "smaps_rollup").get("Pss", 0) + sum(map(_tree_pss, _children(proc)))


def _children(proc: Path) -> list[Path]:
    """Of all threads; a process that ends meanwhile has none."""
    pids = " ".join(_read(file) for file in proc.glob("task/*/children")).split()
    return [Path("/proc") / pid for pid in pids]


def _read(file: Path) -> str:
    """Empty if its process or thread has ended."""
    try:
        return file.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
