"""The command itself: help, version, and bad input that ends in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flexinfer.attention import BACKENDS
from flexinfer.cli.app import app
from helpers.cli_folder import make_folder

DEMO = ("demo", "--conversations", "2", "--turns", "3")


def invoke(*arguments: str, text: str = "") -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments), input=text)
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("arguments", [("--help",), ("demo", "--help"), ("chat", "-h")])
def test_help_is_there(arguments: tuple[str, ...]) -> None:
    code, out, _ = invoke(*arguments)
    assert code == 0
    assert "Usage" in out


def test_an_option_without_a_default_must_be_given() -> None:
    code, _, error = invoke("simulate")
    assert code == 2
    assert "Missing option '--trace'" in error


@pytest.mark.parametrize("command", ["demo", "chat", "serve"])
def test_the_help_says_what_threads_are_by_default(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})
    assert "--threads" in result.stdout
    assert "one for each core this process may use" in result.stdout
    assert "--compile" in result.stdout


@pytest.mark.parametrize("command", ["demo", "chat"])
def test_threads_and_compile_reach_the_engine(
    command: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flexinfer import llm

    class OpenedError(Exception):
        pass

    def open_llm(**settings: Any) -> None:
        raise OpenedError(settings["threads"], settings["compile"])

    monkeypatch.setattr(llm, "LLM", open_llm)
    sizes = DEMO[1:] if command == "demo" else ()
    for given, expected in (((), (None, False)), (("--threads", "1", "--compile"), (1, True))):
        result = CliRunner().invoke(app, [command, "--model", folder, *sizes, *given])
        assert isinstance(result.exception, OpenedError)
        assert result.exception.args == expected


def test_version_is_that_of_the_package() -> None:
    import flexinfer

    assert invoke("--version")[1].strip() == f"flexinfer {flexinfer.__version__}"


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from flexinfer.cli import main\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'flexinfer._vtensor'} & set(sys.modules)\n"
        "sys.exit(f'loads {sorted(heavy)}' if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_a_command_ends_without_taking_the_interpreter_apart() -> None:
    program = (
        "import atexit, sys; import flexinfer.cli.app\n"
        "class Kept: __del__ = lambda self: print('taken apart')\n"
        "kept = Kept()\n"
        "command = lambda: (atexit.register(print, 'called'), sys.exit(3))\n"
        "module = sys.modules['flexinfer.cli.app']; module.app = command; module.main()"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 3
    assert result.stdout == "called\n"


@pytest.mark.parametrize("command", ["demo", "chat"])
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--model", "/no/such/folder"), "does not exist"),
        (("--dtype", "int8"), "dtype must be one of"),
        (("--memory", "1KiB"), "less than one chunk"),
        (("--memory", "plenty"), "plenty"),
        (("--chunk-bytes", "1000"), "granularity"),
        (("--layers-per-plane", "3"), "layers_per_plane"),
        (("--threads", "0"), "threads must be a positive integer, got 0"),
        (("--threads", "4096"), "threads is 4096, but this process may use"),
    ],
)
def test_bad_input_ends_in_one_line_and_code_2(
    command: str, arguments: tuple[str, ...], says: str, folder: str
) -> None:
    sizes = DEMO[1:] if command == "demo" else ()
    code, _, err = invoke(command, "--model", folder, *sizes, *arguments)
    assert code == 2
    assert says in err
    assert "Traceback" not in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--conversations", "9"), "2 conversations, not 9"),
        (("--turns", "9"), "3 turns, not 9"),
        (("--plot", "memory.doc"), "--plot writes"),
        (("--plot", "/no/such/folder/m.png"), "does not exist"),
        (("--json", "/no/such/folder/m.json"), "does not exist"),
    ],
)
def test_a_demo_that_can_not_be_is_refused_before_any_work(
    arguments: tuple[str, ...], says: str, folder: str
) -> None:
    code, _, err = invoke(*DEMO, "--model", folder, *arguments)
    assert code == 2
    assert says in err


def test_plot_without_matplotlib_names_the_extra(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = invoke(*DEMO, "--model", folder, "--plot", str(tmp_path / "m.png"))
    assert code == 2
    assert "flexinfer[bench]" in err


def test_a_server_needs_no_stderr() -> None:
    """It ended by code 1 in silence; now it gets as far as the model."""
    serve = f"exec {sys.executable} -m flexinfer.cli serve /no/such --port 0 2>&-"
    assert subprocess.run(["sh", "-c", serve]).returncode == 2


def test_chat_refuses_wrong_sampling() -> None:
    code, _, err = invoke("chat", "--top-p", "3")
    assert code == 2
    assert "top_p must be in" in err


def test_a_chat_can_be_traced_and_replayed(folder: str, tmp_path: Path) -> None:
    trace = str(tmp_path / "chat.jsonl")
    code, out, err = invoke(
        "chat", "--model", folder, "--max-tokens", "4", "--trace", trace, text="hello\n/exit\n"
    )
    assert code == 0, out + err
    assert invoke("replay", trace)[0] == 0


@pytest.mark.parametrize("command", [("demo",), ("chat",), ("serve",), ("bench", "step")], ids=str)
def test_every_command_names_all_attention_backends(command: tuple[str, ...]) -> None:
    _, out, _ = invoke(*command, "--help")
    text = " ".join(out.replace("\u2502", " ").split())
    assert f"{', '.join(BACKENDS[:-1])} or {BACKENDS[-1]}" in text
