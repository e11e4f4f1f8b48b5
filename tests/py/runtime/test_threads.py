"""Threads come from affinity, cores and cgroup quota; bad numbers are refused with the reason."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flexinfer.runtime.threads import CpuQuota, choose_threads, cpu_quota

NUM_CPUS = len(os.sched_getaffinity(0))
V2_MOUNT = "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup rw,nsdelegate"
V1_MOUNT = "31 1 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct"


def make_root(root: Path, cgroup: str, mounts: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": cgroup, "proc/self/mountinfo": mounts, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_without_a_cgroup_the_affinity_counts(tmp_path: Path) -> None:
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    assert cpu_quota(tmp_path) == CpuQuota(NUM_CPUS, NUM_CPUS, "its CPU affinity", cpus)


@pytest.mark.parametrize(
    ("text", "num_cpus"),
    [("100000 100000", 1), ("50000 100000", 1), ("max 100000", NUM_CPUS), ("", NUM_CPUS)],
)
def test_quota_of_cgroup_v2(tmp_path: Path, text: str, num_cpus: int) -> None:
    files = {"sys/fs/cgroup/pod/cpu.max": text}
    root = make_root(tmp_path, "0::/pod/main", V2_MOUNT, files)
    assert cpu_quota(root).num_cpus == num_cpus


def test_quota_of_cgroup_v1(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/cpu/docker/abc/"
    files = {folder + "cpu.cfs_quota_us": "90000", folder + "cpu.cfs_period_us": "100000"}
    root = make_root(tmp_path, "4:cpu,cpuacct:/docker/abc\n0::/", V1_MOUNT, files)
    quota = cpu_quota(root)
    assert quota.num_cpus == 1
    assert quota.reason == "cgroup cpu.cfs_quota_us = 0.9"


def test_unlimited_quota_of_cgroup_v1(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "9"}
    root = make_root(tmp_path, "4:cpu:/", V1_MOUNT, files)
    assert cpu_quota(root).num_cpus == NUM_CPUS


def test_a_cgroup_that_is_mounted_as_root_is_read(tmp_path: Path) -> None:
    """Containers without a cgroup namespace: the path is the host's, the mount shows its end."""
    mount = "30 1 0:26 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup rw"
    files = {"sys/fs/cgroup/cpu.max": "30000 100000"}
    root = make_root(tmp_path, "0::/docker/abc", mount, files)
    assert cpu_quota(root).reason == "cgroup cpu.max = 0.3"


def test_hardware_threads_of_one_core_count_once(tmp_path: Path) -> None:
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    siblings = {topology.format(cpu): "0-1" for cpu in os.sched_getaffinity(0)}
    quota = cpu_quota(make_root(tmp_path, "", "", siblings))
    assert (quota.num_cpus, quota.num_cores) == (NUM_CPUS, 1)


QUOTA = CpuQuota(num_cpus=4, num_cores=2, reason="cgroup cpu.max = 4.5")


@pytest.mark.parametrize(("threads", "count"), [(None, 2), (1, 1), (4, 4)])
def test_threads_within_the_quota(threads: int | None, count: int) -> None:
    assert choose_threads(threads, QUOTA) == count


@pytest.mark.parametrize(
    ("threads", "says"),
    [
        (0, "positive integer, got 0"),
        (-2, "positive integer, got -2"),
        (True, "positive integer, got True"),
        (5, r"may use 4 CPUs \(cgroup cpu.max = 4.5\)"),
    ],
)
def test_other_numbers_are_refused_with_the_reason(threads: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        choose_threads(threads, QUOTA)
