"""Machine: what the kernel says about this machine and this container, from /proc and /sys.

`root` is put before every path, so that a test can show a tree of its own. What cannot be read
is None.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    root: Path = Path("/")

    def read(self, path: str) -> str | None:
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return None

    def number(self, path: str) -> int | None:
        text = self.read(path)
        return int(text) if text is not None and re.fullmatch(r"-?\d+", text) else None

    def choice(self, path: str) -> str | None:
        """The chosen word of a file like "always [madvise] never"."""
        chosen = re.search(r"\[(\w+)\]", self.read(path) or "")
        return chosen[1] if chosen else None

    def memory_bytes(self, name: str) -> int | None:
        """A line of /proc/meminfo, such as MemAvailable."""
        line = re.search(rf"^{name}:\s+(\d+) kB$", self.read("proc/meminfo") or "", re.MULTILINE)
        return int(line[1]) * 1024 if line else None

    def cgroups(self) -> list[Path]:
        """Folders of the cgroups of this process, the innermost first, relative to `root`.

        A container sees its own group as the root of the mount, whatever /proc/self/cgroup says:
        of both places those that exist count.
        """
        folders: list[Path] = []
        for line in (self.read("proc/self/cgroup") or "").splitlines():
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            base = Path("sys/fs/cgroup")
            if controllers:
                base = next(
                    (
                        b
                        for b in (base / controllers, *(base / c for c in controllers.split(",")))
                        if (self.root / b).is_dir()
                    ),
                    base / controllers,
                )
            inner = base / path.lstrip("/")
            folders += [
                f
                for f in (inner, *inner.parents)
                if (f == base or base in f.parents) and (self.root / f).is_dir()
            ]
        return list(dict.fromkeys(folders))

    def cpu_quota(self) -> float | None:
        """Cores that the container may use; None without a limit."""
        quotas = []
        for folder in self.cgroups():
            quota, period = None, None
            if text := self.read(f"{folder}/cpu.max"):  # v2: "150000 100000" or "max 100000"
                first, _, second = text.partition(" ")
                quota, period = (int(first) if first.isdecimal() else None), int(second or 100_000)
            elif (v1 := self.number(f"{folder}/cpu.cfs_quota_us")) is not None and v1 > 0:
                quota, period = v1, self.number(f"{folder}/cpu.cfs_period_us")
            if quota and period:
                quotas.append(quota / period)
        return min(quotas, default=None)

    def memory_limit_bytes(self) -> int | None:
        """The least of the container's limits; None without one."""
        names = ("memory.max", "memory.limit_in_bytes")
        total = self.memory_bytes("MemTotal") or (1 << 62)
        limits = [
            limit
            for folder in self.cgroups()
            for name in names
            if (limit := self.number(f"{folder}/{name}")) is not None and limit < total
        ]
        return min(limits, default=None)


def num_cpus() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0))
