"""`flexinfer bench step` measures a batch and says where its time goes."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree

import pytest

pytest.importorskip("torch")

from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from flexinfer.cli.app import app
from helpers.cli_folder import make_folder

SMALL = ("--requests", "3", "--prompt-tokens", "9", "--new-tokens", "4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_folder(tmp_path_factory.mktemp("model"))


def bench(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["bench", "step", *arguments])
    return result.exit_code, result.output


@pytest.mark.parametrize("more", [(), ("--random-weights", "--dtype", "float32")])
def test_parts_of_a_step_add_up_to_it(folder: str, tmp_path: Path, more: tuple[str, ...]) -> None:
    file = tmp_path / "step.json"
    code, _ = bench("--model", folder, *SMALL, "--profile", "--json", str(file), *more)
    report = json.loads(file.read_text())
    assert code == 0
    assert report["prefill"]["num_steps"] == 1
    assert report["decode"]["num_steps"] == 3
    for kind in ("prefill", "decode"):
        parts = report[kind]["parts"]
        assert sum(part["ms"] for part in parts.values()) == pytest.approx(report[kind]["step_ms"])
        assert {"linear", "attention", "norm", "inputs", "sampling"} <= {
            name for name, part in parts.items() if part["calls"] >= 1 and part["ms"] > 0
        }


def test_each_part_is_held_against_what_the_machine_can_do(folder: str, tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    code, out = bench("--model", folder, *SMALL, "--roofline", "--json", str(file))
    report = json.loads(file.read_text())
    assert code == 0
    assert "this machine reads" in out
    limits = report["limits"]
    for kind in ("prefill", "decode"):
        parts = report[kind]["parts"]
        reaching = {name for name, part in parts.items() if part["of_limit"] > 0}
        assert reaching == {"linear", "attention"}
        linear = parts["linear"]
        least_s = max(
            linear["gflop"] / limits["gflop_per_s"], linear["mbytes"] / 1e3 / limits["gbytes_per_s"]
        )
        assert linear["of_limit"] == pytest.approx(1e3 * least_s / linear["ms"])
    decode = report["decode"]
    least_ms = sum(part["of_limit"] * part["ms"] for part in decode["parts"].values())
    assert report["decode_of_limit"] == pytest.approx(least_ms / report["decode_step_ms"])
    assert f"could take {report['decode_of_limit']:.0%}" in out


def test_requests_longer_than_the_model_takes_are_one_line(folder: str) -> None:
    code, out = bench("--model", folder, *SMALL, "--prompt-tokens", "5000")
    assert (code, len(out.splitlines())) == (2, 1)
    assert "prompts of 5000 tokens and 4 new ones are more than the " in out


def test_without_profile_there_are_no_parts(folder: str) -> None:
    code, out = bench("--model", folder, *SMALL)
    assert code == 0
    assert "decode step" in out
    assert "milliseconds a step" not in out


def test_the_engine_is_as_before_when_the_profiler_closes(folder: str) -> None:
    from flexinfer import LLM
    from flexinfer.engine.profile import StepProfiler

    with LLM(folder, kv_cache_memory_bytes=64 << 20) as llm:
        engine = llm.engine
        hooked = (engine, engine.scheduler, engine.runner, engine.manager, engine.runner.backend)
        before = [set(vars(part)) for part in hooked]
        with StepProfiler(engine):
            llm.generate("hello", use_tqdm=False)
        assert [set(vars(part)) for part in hooked] == before
        assert not any(module._forward_hooks for module in engine.loaded.model.modules())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--threads", "0"), "threads must be a positive integer, got 0"),
        (("--threads", "4096"), "this process may use"),
        (("--shared-tokens", "9"), "each needs one of its own"),
        (("--attention-backend", "magic"), "must be one of"),
        (("--roofline", "--device", "cuda"), "--roofline measures CPUs alone"),
    ],
)
def test_bad_input_is_one_line(folder: str, arguments: tuple[str, ...], says: str) -> None:
    code, out = bench("--model", folder, *SMALL, *arguments)
    assert code == 2
    assert says in " ".join(out.split())
    assert "Traceback" not in out


def test_a_batch_that_fails_is_no_measurement(folder: str, tmp_path: Path) -> None:
    """Steps that were none gave an AttributeError."""
    broken = copytree(folder, tmp_path / "model")
    weights = broken / "model.safetensors"
    nothing = {name: part * float("nan") for name, part in load_file(weights).items()}
    save_file(nothing, weights, metadata={"format": "pt"})
    code, out = bench("--model", str(broken), *SMALL)
    assert code == 2
    assert "flexinfer: a request has failed: " in out


def test_a_dtype_that_random_weights_cannot_have_is_refused() -> None:
    code, out = bench("--random-weights", "--dtype", "x", *SMALL)
    assert code == 2
    assert "--dtype must be one of" in out
