"""What the system does not let a process do is told in one line, before any work."""

from __future__ import annotations

import resource
import subprocess
import sys
import threading

import pytest
from typer.testing import CliRunner

from flexinfer.cli.app import app
from flexinfer.cli.settings import SHIPPED_MODEL
from flexinfer.runtime.process import ENGINE_THREADS, check_process, check_threads
from flexinfer.runtime.threads import cpu_quota

NUM_NEEDED = 1 + cpu_quota().num_cpus + ENGINE_THREADS


@pytest.fixture
def few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system refuses the fourth."""
    monkeypatch.delenv("RAYON_NUM_THREADS", raising=False)
    real, started = threading.Thread.start, []

    def start(thread: threading.Thread) -> None:
        if len(started) == 3:
            raise RuntimeError("can't start new thread")
        real(thread)
        started.append(thread)

    monkeypatch.setattr(threading.Thread, "start", start)


def test_threads_that_can_be_started_have_ended_after_the_check() -> None:
    before = threading.active_count()
    check_threads(1, num_others=20)
    assert threading.active_count() == before


@pytest.mark.usefixtures("few_threads")
def test_threads_that_are_refused_are_counted() -> None:
    before = threading.active_count()
    with pytest.raises(OSError, match=f"start 3 threads, and {NUM_NEEDED + 5} are needed, 1 of"):
        check_threads(1, num_others=5)
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("limit", "named"),
    [
        (resource.RLIMIT_NPROC, "raise ulimit -u or pids.max"),
        (resource.RLIMIT_AS, "raise ulimit -v or pids.max"),
        (None, "raise pids.max of the container"),
    ],
)
@pytest.mark.usefixtures("few_threads")
def test_the_limits_that_there_are_are_named(
    limit: int | None, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda of: (7 if of == limit else -1, -1))
    with pytest.raises(OSError, match=named):
        check_threads(1)


def test_numbers_that_the_environment_has_chosen_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("RAYON_NUM_THREADS", "5")
    monkeypatch.setattr("flexinfer.runtime.process._num_startable", lambda num_wanted: 0)
    needed = rf"{ENGINE_THREADS + 12} are needed, 7 of them OpenMP's and 5 the tokenizer's"
    with pytest.raises(OSError, match=needed):
        check_process(None)


@pytest.mark.usefixtures("few_threads")
@pytest.mark.parametrize("command", ["serve", "chat", "demo"])
def test_a_command_says_in_one_line_that_threads_are_refused(command: str) -> None:
    model = [str(SHIPPED_MODEL)] if command == "serve" else []
    result = CliRunner().invoke(app, [command, *model])
    assert result.exit_code == 2
    assert result.stderr.startswith("flexinfer: the system lets this process start 3 threads")
    assert result.stderr.count("\n") == 1


def test_an_interpreter_without_docstrings_is_refused_by_name() -> None:
    code = "from flexinfer.runtime.process import check_process; check_process(None)"
    result = subprocess.run([sys.executable, "-OO", "-c", code], capture_output=True, text=True)
    assert "ValueError: python -OO (PYTHONOPTIMIZE=2) removes docstrings" in result.stderr
