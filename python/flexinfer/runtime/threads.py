"""Threads: how many CPUs this process may use, and how many threads to start. No torch.

torch starts a thread for each core of the machine, also where the container's quota allows fewer:
then each parallel loop waits for threads that are not running. Here the count comes from the
affinity mask, the cores behind it, and the cgroup's CPU quota, whichever is least.

One pool of OpenMP threads serves torch, oneDNN, MKL and the host kernel alike, as all of them load
the same libgomp; the memory manager's worker sleeps but for some microseconds per step. So
`threads` is the count for all of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CpuQuota:
    """CPUs that this process may use."""

    num_cpus: int
    """Hardware threads at most; a fraction of a CPU counts only if there is no whole one."""
    num_cores: int
    """Threads that are worth starting: two hardware threads of one core share its arithmetic."""
    reason: str
    """What limits them."""
    cpus: tuple[int, ...] = ()
    """The CPUs to run on, of which a cgroup may allow only a share of the time."""


def cpu_quota(root: Path = Path("/")) -> CpuQuota:
    """Quota of this process. `root` is where /proc and /sys are found."""
    cpus = usable_cpus()
    quota, reason = float(len(cpus)), "its CPU affinity"
    for limit, source in _cgroup_limits(root):
        if limit < quota:
            quota, reason = limit, f"{source} = {limit:g}"
    num_cpus = max(1, int(quota))
    return CpuQuota(num_cpus, min(num_cpus, _num_cores(cpus, root)), reason, tuple(cpus))


def choose_threads(threads: int | None, quota: CpuQuota) -> int:
    """The number of threads. None: one for each core of the quota.

    Raises ValueError for fewer than one and for more than the quota has CPUs.
    """
    if threads is None:
        return quota.num_cores
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise ValueError(
            f"threads must be a positive integer, got {threads!r}; leave it out to use "
            f"all {quota.num_cores} cores of this process"
        )
    if threads > quota.num_cpus:
        raise ValueError(
            f"threads is {threads}, but this process may use {quota.num_cpus} CPUs "
            f"({quota.reason}): threads without a CPU hold up all others. "
            f"Ask for at most {quota.num_cpus}, or leave it out"
        )
    return threads


def usable_cpus() -> list[int]:
    """The affinity mask, unless OpenMP was told to bind threads: then that of the calling thread
    says where this one runs, and not where the others may."""
    if any(name in os.environ for name in ("GOMP_CPU_AFFINITY", "OMP_PROC_BIND", "OMP_PLACES")):
        return list(range(os.cpu_count() or 1))
    return sorted(os.sched_getaffinity(0))


def _num_cores(cpus: list[int], root: Path) -> int:
    """Physical cores behind these hardware threads."""
    cores = set()
    for cpu in cpus:
        siblings = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        cores.add(_read(siblings) or str(cpu))
    return len(cores)


def _cgroup_limits(root: Path) -> Iterator[tuple[float, str]]:
    """(CPUs, file that says so) of this process's cgroups and all above them."""
    paths = dict(_cgroup_paths(root))
    for controllers, mount_root, mount in _cgroup_mounts(root):
        path = paths.get("cpu" if "cpu" in controllers else "")
        if path is None:
            continue
        inside = Path(os.path.relpath(path, mount_root))
        for folder in (inside, *inside.parents):
            if ".." in folder.parts:
                continue  # the process has left the part that is mounted here
            yield from _limits_of(root / mount.lstrip("/") / folder)


def _limits_of(folder: Path) -> Iterator[tuple[float, str]]:
    """cgroup v2: cpu.max has "quota period" or "max period"; v1 has a file for each."""
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        yield int(quota) / int(period), "cgroup cpu.max"
    quota = _read(folder / "cpu.cfs_quota_us")
    period = _read(folder / "cpu.cfs_period_us")
    if quota.isdigit() and period.isdigit():
        yield int(quota) / int(period), "cgroup cpu.cfs_quota_us"


def _cgroup_paths(root: Path) -> Iterator[tuple[str, str]]:
    """(controller, path) of this process; the controller of cgroup v2 is ""."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            yield controller, path


def _cgroup_mounts(root: Path) -> Iterator[tuple[set[str], str, str]]:
    """(controllers, path of the mounted cgroup, mount point) of all that may limit CPUs."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), after.split(" ", 2)
        controllers = set(options.split(","))
        if kind == "cgroup2" or (kind == "cgroup" and "cpu" in controllers):
            yield (controllers if kind == "cgroup" else set()), fields[3], fields[4]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
