"""scripts/gpu_check.sh and its helpers: what can be shown without a GPU and without waiting."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.cuda_devices import hides_gpus, num_cuda_devices

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "gpu_check.sh"
RESERVE_S = 15
CALL_S = 540

sys.path.insert(0, str(ROOT / "scripts"))


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(SCRIPT), *arguments], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("number", "1234")
def test_the_budgets_of_each_call_fit_into_nine_minutes(number: str) -> None:
    rows = [line.split() for line in call("--list").stdout.splitlines()]
    budgets = {name: int(budget) for name, calls, budget, *_ in rows if number in calls}
    assert list(budgets)[:2] == ["environment", "build"]
    assert sum(budgets.values()) + RESERVE_S <= CALL_S


@pytest.mark.parametrize("arguments", [("--only", "nonsense"), ("--skip", "x"), ("--nonsense",)])
def test_wrong_arguments_are_refused_with_the_known_ones(arguments: tuple[str, ...]) -> None:
    done = call(*arguments)
    assert done.returncode == 1
    assert "there are: environment" in done.stderr or "--help" in done.stderr


def test_calls_follow_each_other_and_keep_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a number it is the first call that was not made; each says what is next."""
    monkeypatch.setenv("GPU_CHECK_DIR", str(tmp_path))
    names = {line.split()[0] for line in call("--list").stdout.splitlines()}
    for number in "1234":
        done = call("--skip", ",".join(names), "--dry-run-on-cpu")
        assert done.returncode == 0, done.stderr
        assert "0 stages failed" in done.stdout
        expected = f"next: scripts/gpu_check.sh {int(number) + 1}" if number < "4" else "all four"
        assert expected in done.stdout
        assert (tmp_path / "calls" / number / "ended").exists()
    (tmp_path / "calls" / "1" / "kernels.json").write_text("{}")
    assert call("1", "--skip", ",".join(names), "--dry-run-on-cpu").returncode == 0
    assert len(list(tmp_path.glob("calls/1.until-*/kernels.json"))) == 1
    text = (tmp_path / "results" / "summary.md").read_text()
    assert "# Call 1" in text
    assert "# Call 3" in text


def test_a_stage_that_fails_leaves_a_report_and_says_what_to_repair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_CHECK_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHON", "/bin/false")
    done = call("1", "--dry-run-on-cpu")
    assert done.returncode == 1
    assert "next: look at environment" in done.stdout
    stages = (tmp_path / "calls" / "1" / "stages.tsv").read_text()
    assert "engine\tskipped\t0\t0\tstage environment failed" in stages


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
    for option in ("--only", "--seconds", "--dry-run-on-cpu", "--pack", "--budget"):
        assert option in text


@pytest.fixture
def calls_folder(tmp_path: Path) -> Path:
    """What gpu_check.sh leaves: one stage failed, one was skipped, one was ended by force."""
    run = tmp_path / "calls" / "1"
    run.mkdir(parents=True)
    (run / "commit").write_text("abc1234\n")
    (run / "command").write_text("scripts/gpu_check.sh 1\n")
    (run / "notes.txt").write_text("package einops: not installed\n")
    (run / "stages.tsv").write_text(
        "build\tpassed\t20\t60\t\n"
        "ctest\tfailed\t9\t75\texit code 8\n"
        "flash-start\tskipped\t0\t5\tnvcc is not on the PATH\n"
    )
    tests = [
        {"test": "a::ok", "outcome": "passed", "seconds": 1.0, "reason": ""},
        {"test": "a::bad", "outcome": "started"},
        {"test": "a::bad", "outcome": "failed", "seconds": 1.0, "reason": "assert 1 == 2"},
        {"test": "a::not", "outcome": "skipped", "seconds": 0.0, "reason": "no flash-attn"},
        {"test": "a::hangs", "outcome": "started"},
    ]
    (run / "tests.jsonl").write_text("".join(json.dumps(test) + "\n" for test in tests))
    (run / "api_latency.json").write_text(
        json.dumps(
            {
                "quick": True,
                "complete": False,
                "environment": {"gpu": "Test GPU", "command": "python bench.py", "commit": "x"},
                "latency_us": [{"chunk_mib": 2, "create": 30.0}],
                "bandwidth": [],
                "left_out": ["chunks of 32 MiB"],
            }
        )
    )
    return run.parent


def test_the_summary_hides_nothing(calls_folder: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    command = [sys.executable, str(ROOT / "scripts" / "gpu_report.py")]
    command += [str(calls_folder), str(results), "--plots"]
    subprocess.run(command, check=True, capture_output=True)
    text = (results / "summary.md").read_text()
    for part in (
        "FAILED: 1: ctest",
        "nvcc is not on the PATH",
        "einops",
        "failed: a::bad: assert 1 == 2",
        "1 times: no flash-attn",
        "was running at the end: a::hangs",
        "left out: chunks of 32 MiB",
        "ended before it was through",
        "Test GPU",
        "call 2 was not made",
    ):
        assert part in text
    assert len(list(results.iterdir())) <= 8  # all that comes back from the lent machine
    failed = json.loads((results / "results.json").read_text())["1"]["tests"]["failed"]
    assert failed == ["a::bad: assert 1 == 2"]


def test_results_are_written_test_by_test(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(
        "import os, pytest\n"
        "def test_ok(): pass\n"
        "def test_bad(): assert 1 == 2\n"
        "def test_not(): pytest.skip('no GPU')\n"
        "def test_dies(): os._exit(3)\n"
    )
    file = tmp_path / "tests.jsonl"
    command = [sys.executable, "-m", "pytest", "-p", "gpu_results", "-c", "/dev/null"]
    command += ["--gpu-results", str(file), "--rootdir", str(tmp_path), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts")}
    subprocess.run(command, env=environment, capture_output=True)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    seen = [(line["test"].partition("::")[2], line["outcome"]) for line in lines]
    ends = [one for one in seen if one[1] != "started"]
    assert ends == [("test_ok", "passed"), ("test_bad", "failed"), ("test_not", "skipped")]
    assert seen[-1] == ("test_dies", "started")
    assert [line["reason"] for line in lines if line["outcome"] == "skipped"] == ["no GPU"]


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


@pytest.mark.parametrize(
    ("expression", "hidden"),
    [
        ("", True),
        ("not slow and not gpu and not browser", True),
        ("gpu", False),
        ("gpu and not slow", False),
        ("not slow and gpu", False),
    ],
)
def test_only_tests_for_a_gpu_see_one(expression: str, hidden: bool) -> None:
    assert hides_gpus(expression) == hidden


def test_the_tests_of_this_run_see_what_they_are_to_see(pytestconfig: pytest.Config) -> None:
    hidden = hides_gpus(pytestconfig.getoption("markexpr"))
    assert (os.environ.get("CUDA_VISIBLE_DEVICES") == "") == hidden
    assert not (hidden and num_cuda_devices())
