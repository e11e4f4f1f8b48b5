"""`flexinfer doctor`: each problem is found on a machine that has it, with what to do about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flexinfer.cli.app import app
from flexinfer.cli.doctor import checks
from flexinfer.cli.doctor.checks import Check, machine_checks, package_checks
from flexinfer.cli.doctor.machine import Machine, num_cpus

HEALTHY = {
    "proc/sys/vm/max_map_count": "262144\n",
    "proc/sys/vm/overcommit_memory": "0\n",
    "proc/meminfo": "MemTotal:       16384000 kB\nMemAvailable:   12288000 kB\n",
    "proc/self/cgroup": "0::/pod/app\n",
    "sys/fs/cgroup/pod/app/cpu.max": "max 100000\n",
    "sys/fs/cgroup/pod/app/memory.max": "max\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always [advise] never\n",
}


def machine(folder: Path, **changes: str) -> Machine:
    """A healthy machine, but for files whose path ends with a name in `changes`."""
    for path, text in HEALTHY.items():
        changed = [value for name, value in changes.items() if path.endswith(name)]
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(changed[0] if changed else text)
    return Machine(folder)


def found(machine: Machine) -> dict[str, Check]:
    return {check.name: check for check in machine_checks(machine)}


def test_a_healthy_machine_has_no_problem_and_no_advice(tmp_path: Path) -> None:
    for check in found(machine(tmp_path)).values():
        assert (check.status, check.advice) == ("ok", ""), check


@pytest.mark.parametrize(
    ("file", "text", "name", "status", "advice"),
    [
        ("max_map_count", "4096", "vm.max_map_count", "warning", "sysctl -w vm.max_map_count"),
        ("overcommit_memory", "2", "vm.overcommit_memory", "warning", "overcommit_memory=0"),
        ("enabled", "always madvise [never]", "transparent huge pages", "note", "echo madvise"),
        ("memory.max", str(500 << 20), "memory", "warning", "container's limit"),
    ],
)
def test_what_is_wrong_is_named_with_a_remedy(
    file: str, text: str, name: str, status: str, advice: str, tmp_path: Path
) -> None:
    check = found(machine(tmp_path, **{file: text}))[name]
    assert check.status == status
    assert advice in check.advice


def test_files_smaller_than_memory_are_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (4096, 4096))
    check = found(machine(tmp_path))["file size"]
    assert (check.status, check.found) == ("problem", "4.0 KiB")
    assert "ulimit -f unlimited" in check.advice


def test_threads_that_a_server_cannot_start_are_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexinfer.runtime.process._num_startable", lambda num_wanted: 5)
    check = found(machine(tmp_path))["threads"]
    assert check.status == "problem"
    assert "lets this process start 5 threads" in check.found


@pytest.mark.parametrize(("free_bytes", "status"), [(256 << 20, "problem"), (1 << 30, "ok")])
def test_less_memory_than_the_headroom_is_a_problem(
    free_bytes: int, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexinfer.vtensor.available_memory_bytes", lambda: free_bytes)
    (check,) = checks._headroom()
    assert (check.status, bool(check.advice)) == (status, status != "ok")


@pytest.mark.parametrize(
    ("forced", "status"), [("", "ok"), ("portable", "ok"), ("avx1024", "problem")]
)
def test_an_instruction_set_that_is_not_there_is_a_problem(
    forced: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXINFER_SIMD", forced)
    (check,) = checks._instruction_set()
    assert (check.status, forced in check.found) == (status, True)
    assert ("portable" in check.advice) == (status == "problem")


def test_a_machine_that_can_not_be_read_is_no_problem(tmp_path: Path) -> None:
    checks = found(Machine(tmp_path))
    assert all(check.status in ("ok", "note") for check in checks.values())
    assert checks["memory"].found == "cannot be read"


def test_the_quota_is_the_least_on_the_way_to_the_root(tmp_path: Path) -> None:
    host = machine(tmp_path, **{"cpu.max": "300000 100000"})
    assert host.cpu_quota() == 3.0
    (tmp_path / "sys/fs/cgroup/pod/cpu.max").write_text("50000 100000\n")
    assert host.cpu_quota() == 0.5


def test_a_quota_below_the_cores_names_the_threads(tmp_path: Path) -> None:
    check = found(machine(tmp_path, **{"cpu.max": f"{num_cpus() * 50000} 100000"}))["cores"]
    assert check.status == "warning"
    assert f"OMP_NUM_THREADS={max(1, num_cpus() // 2)}" in check.advice


def test_cgroups_of_version_1_are_read(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:cpu,cpuacct:/docker/x\n3:memory:/docker/x\n",
        "proc/meminfo": HEALTHY["proc/meminfo"],
        # As a container sees them: its own group is the root of the mount.
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 << 30}\n",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    host = Machine(tmp_path)
    assert host.cpu_quota() == 1.5
    assert host.memory_limit_bytes() == 2 << 30


def test_an_unlimited_group_of_version_1_is_no_limit(tmp_path: Path) -> None:
    host = machine(tmp_path, cgroup="3:memory:/x\n")
    folder = tmp_path / "sys/fs/cgroup/memory/x"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert host.memory_limit_bytes() is None


def test_packages_that_lack_are_problems_only_if_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "PACKAGES", {"no-such-a": "", "no-such-b": "serve", "numpy": ""})
    by_name = {check.name: check for check in package_checks()}
    assert by_name["no-such-a"].status == "problem"
    assert by_name["no-such-b"].status == "note"
    assert "flexinfer[serve]" in by_name["no-such-b"].advice
    assert by_name["numpy"].status == "ok"


def test_this_machine_maps_and_shares() -> None:
    assert checks._try_manager("cpu").status == "ok"


def test_a_device_without_aliasing_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from flexinfer import vtensor

    class Copying(vtensor.VTensorManager):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, alias=False, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(vtensor, "VTensorManager", Copying)
    check = checks._try_manager("cpu")
    assert (check.status, check.found) == ("warning", "maps, but does not alias")


def test_a_device_that_fails_says_why() -> None:
    check = checks._try_manager("cuda:99")
    assert check.status == "warning"
    assert check.found
    assert check.advice


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warning", 0), ("problem", 1)])
def test_only_a_problem_fails(
    status: checks.Status, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = Check("machine", "thing", status, "found [this]", "do that")
    monkeypatch.setattr(checks, "all_checks", lambda: [check])
    plain = CliRunner().invoke(app, ["doctor"])
    assert plain.exit_code == code
    assert "found [this]" in plain.stdout
    assert "do that" in plain.stdout
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == code
    assert json.loads(result.stdout)["checks"] == [vars(check)]
