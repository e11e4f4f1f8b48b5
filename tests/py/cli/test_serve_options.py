"""The options of `flexinfer serve`: where they come from, what they become, and their help."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from flexinfer.cli.app import app
from flexinfer.cli.serve.options import ServeOptions
from flexinfer.cli.serve.replicas import replica_options
from flexinfer.cli.serve.settings import engine_config, server_settings
from flexinfer.server.lora_module_path import LoRAModulePath

SNAPSHOT = Path(__file__).with_name("serve_options.json")
"""Flags, environment variables and defaults: people's scripts and files hold them."""


def options(*arguments: str) -> ServeOptions:
    """What `serve` would be called with."""
    group: Any = typer.main.get_command(app)
    command = group.commands["serve"]
    with command.make_context("serve", list(arguments)) as context:
        return ServeOptions(**context.params)


def test_a_flag_goes_before_the_environment_before_the_file_before_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("max-num-seqs: 3\nmax_queue_len: 4\nport: 5\napi-key: [a, b]\n")
    given = ("--config", str(file), "--port", "7")
    assert options().max_num_seqs == 64
    assert options(*given).max_num_seqs == 3
    assert options(*given).api_key == ["a", "b"]
    assert options(*given).port == 7
    monkeypatch.setenv("FLEXINFER_MAX_NUM_SEQS", "9")
    monkeypatch.setenv("FLEXINFER_API_KEY", "c d")
    found = options(*given)
    assert (found.max_num_seqs, found.max_queue_len, found.port) == (9, 4, 7)
    assert found.api_key == ["c", "d"]


def test_a_mapping_in_the_file_is_as_good_as_json(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("speculative-config:\n  method: ngram\n  num_speculative_tokens: 3\n")
    given = '{"method": "ngram", "num_speculative_tokens": 3}'
    for found in (options("--config", str(file)), options("--speculative-config", given)):
        speculation = engine_config(found).speculation
        assert speculation is not None
        assert (speculation.method, speculation.num_speculative_tokens) == ("ngram", 3)


def test_sampling_defaults_reach_the_engine_from_flags_and_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("override-generation-config:\n  temperature: 0.5\ngeneration-config: vllm\n")
    flags = ("--override-generation-config", '{"temperature": 0.5}', "--generation-config", "vllm")
    for found in (options("--config", str(file)), options(*flags)):
        config = engine_config(found)
        assert config.generation_config == "vllm"
        assert config.override_generation_config == {"temperature": 0.5}


def test_replicas_are_told_where_a_folder_of_sampling_defaults_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "advice").mkdir()
    (tmp_path / "vllm").mkdir()  # not meant: the word goes before
    for given, told in (("advice", str(tmp_path / "advice")), ("vllm", "vllm"), ("auto", "auto")):
        found = options("--generation-config", given, "--replicas", "2")
        config = engine_config(found)
        replicas = replica_options(found, config, server_settings(found, config))
        assert replicas.engine.generation_config == told


def test_flags_variables_and_defaults_are_those_of_the_snapshot() -> None:
    group: Any = typer.main.get_command(app)
    found = {
        " ".join([*one.opts, *one.secondary_opts]): [one.envvar, one.default]
        for one in group.commands["serve"].params
    }
    assert found == json.loads(SNAPSHOT.read_text())


@pytest.mark.parametrize("text", ['["a", "b"]', '["a","b"]', "a b"])
def test_a_list_in_the_environment_is_json_or_words(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXINFER_API_KEY", text)
    given = options()
    assert server_settings(given, engine_config(given)).api_keys == ("a", "b")


def test_adapters_are_names_and_folders() -> None:
    words = ("--lora-modules", "a=x/y", "--lora-modules", "b=z=1")
    given = options("--enable-lora", *words)
    found = server_settings(given, engine_config(given)).lora_modules
    assert found == (LoRAModulePath("a", "x/y"), LoRAModulePath("b", "z=1"))
    for wrong, message in (
        (words, "needs --enable-lora"),
        (("--enable-lora", "--lora-modules", "a"), "takes NAME=FOLDER or .*, got 'a'"),
    ):
        given = options(*wrong)
        with pytest.raises(ValueError, match=message):
            server_settings(given, engine_config(given))


SQL = {"name": "sql", "path": "x y", "base_model_name": "z"}
MODULES = (LoRAModulePath("sql", "x y", "z"), LoRAModulePath("mail", "m=1"))


@pytest.mark.parametrize("source", ["flags", "list", "environment", "file"])
def test_adapters_are_json_as_for_vllm_beside_names_and_folders(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--enable-lora"]
    if source == "flags":
        words += ["--lora-modules", json.dumps(SQL), "--lora-modules", "mail=m=1"]
    elif source == "list":
        words += ["--lora-modules", json.dumps([SQL, "mail=m=1"])]
    elif source == "environment":
        monkeypatch.setenv("FLEXINFER_LORA_MODULES", json.dumps(SQL) + " mail=m=1")
    else:
        file = tmp_path / "serve.yaml"
        file.write_text(json.dumps({"lora-modules": [SQL, "mail=m=1"]}))
        words += ["--config", str(file)]
    given = options(*words)
    assert server_settings(given, engine_config(given)).lora_modules == MODULES


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ('{"name": "a"}', "takes base_model_name, name, path, got {'name': 'a'}"),
        ('{"name": "a", "path": "x", "rank": 4}', "takes base_model_name, name, path, got .*rank"),
        ('{"name": "a", "path": 5}', "path must be a string that is not empty, got 5"),
        ('{"name": "", "path": "x"}', "name must be a string that is not empty, got ''"),
        ('{"name": "a", "path": "x", "base_model_name": 5}', "base_model_name must be a string"),
        ('{"name": "a", "path": "x", "is_3d_lora_weight": true}', "experts are not supported"),
        ('{"name": "a", "path": "x"', "is not JSON: it takes NAME=FOLDER or"),
        ('["a=x", 5]', "takes NAME=FOLDER or .*, got 5"),
    ],
)
def test_json_that_names_no_adapter_is_refused(wrong: str, message: str) -> None:
    given = options("--enable-lora", "--lora-modules", wrong)
    with pytest.raises(ValueError, match=f"--lora-modules .*{message}"):
        server_settings(given, engine_config(given))


@pytest.mark.parametrize("text", ['["a", 5]', '["a"'])
def test_half_a_list_of_keys_is_refused(text: str) -> None:
    given = options("--api-key", text)
    with pytest.raises(ValueError, match=r"--api-key .* not a JSON list of strings"):
        server_settings(given, engine_config(given))


@pytest.mark.parametrize("text", ["no-such-option: 1", "- a list", "a: [", "config: x.yaml"])
def test_a_bad_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(typer.BadParameter):
        options("--config", str(file))


def test_options_become_settings(tmp_path: Path) -> None:
    given = options(
        *("--max-request-bytes", "1MiB", "--no-enable-prefix-caching", "--swap-space", "0"),
        *("--distributed-timeout", "2.5"),
    )
    assert (given.threads, given.compile) == (None, False)
    config = engine_config(given)
    made = server_settings(given, config)
    assert made.model_name == "tiny_chat"
    assert config.distributed_timeout_s == 2.5
    assert made.max_request_bytes == 1 << 20
    assert not config.enable_prefix_caching
    with pytest.raises(ValueError, match="chat template"):
        server_settings(replace(given, chat_template=str(tmp_path / "none.jinja")), config)
    for broken, fault in (("{% if x %}", "endif"), ("a\n{{ x | nope }}", "nope")):
        line = broken.count("\n") + 1
        with pytest.raises(ValueError, match=f"template is broken in line {line}: .*{fault}"):
            server_settings(replace(given, chat_template=broken), config)
    with pytest.raises(ValueError, match="differ"):
        server_settings(replace(given, api_key=["x"], admin_api_key="x"), config)


def test_threads_and_compile_are_options_of_the_flags_the_environment_and_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engine_config(options("--threads", "1", "--compile"))
    assert (config.threads, config.compile) == (1, True)
    file = tmp_path / "serve.yaml"
    file.write_text("threads: 2\ncompile: true\n")
    config = engine_config(options("--config", str(file)))
    assert (config.threads, config.compile) == (2, True)
    monkeypatch.setenv("FLEXINFER_THREADS", "3")
    monkeypatch.setenv("FLEXINFER_COMPILE", "0")
    config = engine_config(options("--config", str(file)))
    assert (config.threads, config.compile) == (3, False)


def test_help_has_groups_and_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom flexinfer.cli import main\nsys.argv = ['flexinfer', 'serve', '--help']\n"
        "try: main()\nexcept SystemExit: pass\n"
        "sys.exit(str({'torch', 'fastapi', 'transformers', 'uvicorn'} & set(sys.modules) or 0))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stderr.strip() == "0"
    for group in ("Model and engine", "KV memory", "Scheduling", "Limits", "--max-num-seqs"):
        assert group in result.stdout


@pytest.mark.parametrize("width", [80, 120])
def test_help_cuts_off_no_name(width: int) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "flexinfer.cli", "serve", "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": str(width)},
    )
    assert "…" not in result.stdout
    for option in typer.main.get_command(app).commands["serve"].params:  # type: ignore[attr-defined]
        assert all(name in result.stdout for name in option.opts if name[:2] == "--")
    assert "--no-enable-prefix-caching turns it off" in " ".join(
        result.stdout.replace("│", " ").split()
    )
    assert "FLEXINFER_MAX_NUM_SEQS" in result.stdout


def test_the_longest_request_may_be_written_as_people_do() -> None:
    given = options("--max-model-len", "4K", "--max-num-batched-tokens", "8k")
    config = engine_config(given)
    assert (config.max_model_len, config.max_num_batched_tokens) == (4096, 8000)
    assert engine_config(options("--max-model-len", "auto")).max_model_len is None
    assert engine_config(options("--max-model-len=-1")).max_model_len is None


def test_no_code_of_a_repository_is_run_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    engine_config(options("--trust-remote-code", "--revision", "v1", "--load-format", "dummy"))
    assert "no code of a model's repository is run here" in caplog.text
