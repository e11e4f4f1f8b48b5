"""scripts/gpu_check.sh and its helpers: what can be shown without a GPU and without waiting."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "gpu_check.sh"
RESERVE_S = 15
CALL_S = 540

sys.path.insert(0, str(ROOT / "scripts"))


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(SCRIPT), *arguments], capture_output=True, text=True, timeout=60)


def test_the_budgets_of_one_call_fit_into_nine_minutes() -> None:
    stages = {line.split()[0]: int(line.split()[1]) for line in call("--list").stdout.splitlines()}
    assert sum(stages.values()) - stages["flash-wait"] + RESERVE_S <= CALL_S


@pytest.mark.parametrize("arguments", [("--only", "nonsense"), ("--skip", "x"), ("--nonsense",)])
def test_wrong_arguments_are_refused_with_the_known_ones(arguments: tuple[str, ...]) -> None:
    done = call(*arguments)
    assert done.returncode == 1
    assert "there are: environment" in done.stderr or "--help" in done.stderr


def test_only_the_environment_can_be_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_CHECK_DIR", str(tmp_path))
    done = call("--only", "environment", "--skip", "environment,build", "--dry-run-on-cpu")
    assert done.returncode == 0, done.stderr
    assert "0 stages failed" in done.stdout


@pytest.mark.parametrize(
    ("folder", "missing"),
    [("gpu", ("selenium", "fastapi", "uvicorn", "openai")), ("browser", ("selenium",))],
)
def test_tests_are_collected_where_packages_are_missing(
    folder: str, missing: tuple[str, ...], tmp_path: Path
) -> None:
    for name in missing:
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError({name!r})\n")
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [*command, f"tests/py/{folder}"], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    # 5: nothing was collected, all modules are skipped.
    assert done.returncode == (0 if folder == "gpu" else 5), done.stdout[-3000:]


def test_help_names_every_option() -> None:
    text = call("--help").stdout
    for option in ("--flash", "--only", "--seconds", "--dry-run-on-cpu", "--pack", "--budget"):
        assert option in text


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """What gpu_check.sh leaves when one stage failed and one was skipped."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "commit").write_text("abc1234\n")
    (run / "command").write_text("scripts/gpu_check.sh\n")
    (run / "notes.txt").write_text("package einops: not installed\n")
    (run / "stages.tsv").write_text(
        "build\tpassed\t20\t60\t\n"
        "ctest\tfailed\t9\t75\texit code 8\n"
        "flash-start\tskipped\t0\t5\tnvcc is not on the PATH\n"
    )
    (run / "pytest.xml").write_text(
        '<testsuites><testsuite><testcase classname="a" name="ok"/>'
        '<testcase classname="a" name="bad"><failure message="x"/></testcase>'
        '<testcase classname="a" name="not"><skipped message="no flash-attn"/></testcase>'
        "</testsuite></testsuites>"
    )
    (run / "api_latency.json").write_text(
        json.dumps(
            {
                "quick": True,
                "environment": {"gpu": "Test GPU", "command": "python bench.py", "commit": "x"},
                "latency_us": [{"chunk_mib": 2, "create": 30.0}],
                "bandwidth": [],
                "left_out": ["chunks of 32 MiB"],
            }
        )
    )
    return run


def test_the_summary_hides_nothing(run_folder: Path, tmp_path: Path) -> None:
    results, logs = tmp_path / "results", tmp_path / "logs"
    logs.mkdir()
    command = [sys.executable, str(ROOT / "scripts" / "gpu_report.py")]
    command += [str(run_folder), str(logs), str(results)]
    subprocess.run(command, check=True, capture_output=True)
    text = (results / "summary.md").read_text()
    assert "FAILED: ctest" in text
    for part in ("nvcc is not on the PATH", "einops", "a::bad", "1 times: no flash-attn"):
        assert part in text
    assert "left out: chunks of 32 MiB" in text
    assert "Test GPU" in text
    assert len(list(results.iterdir())) <= 8  # all that comes back from the lent machine
    assert json.loads((results / "results.json").read_text())["tests"]["failed"] == ["a::bad"]


def test_flash_attn_is_reduced_to_the_kernels_that_are_measured(tmp_path: Path) -> None:
    from flash_attn_build import make_lean

    names = [
        f"flash_{kind}_hdim{dim}_{dtype}_{causal}sm80.cu"
        for kind in ("fwd", "fwd_split", "bwd")
        for dim in (64, 128)
        for dtype in ("fp16", "bf16")
        for causal in ("", "causal_")
    ]
    sources = "".join(f'                "csrc/flash_attn/src/{name}",\n' for name in names)
    source_folder = tmp_path / "csrc" / "flash_attn" / "src"
    source_folder.mkdir(parents=True)
    (source_folder / "static_switch.h").write_text("#pragma once\n")
    (tmp_path / "setup.py").write_text(
        'if True:\n    compiler_c17_flag=["-O3", "-std=c++17"]\n'
        '    nvcc_flags = [\n    "-O3",\n    ]\n'
        f'sources = [\n                "csrc/flash_attn/flash_api.cpp",\n{sources}]\n'
    )
    kept = make_lean(tmp_path)
    assert len(kept) == 4
    assert all("hdim128_bf16" in name and "bwd" not in name for name in kept)
    setup = (tmp_path / "setup.py").read_text()
    assert "without_backward.cpp" in setup
    assert setup.count("-DFLASHATTENTION_DISABLE_BACKWARD") == 2  # for nvcc and for the compiler
    compile(setup, "setup.py", "exec")
    assert make_lean(tmp_path) == kept, "a second call changes nothing"
