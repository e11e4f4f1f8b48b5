"""Lines and files for `vllm serve`: taken, passed over, or refused with what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from flexinfer.cli.app import app
from flexinfer.cli.serve.options import ServeOptions
from flexinfer.cli.serve.settings import engine_config, server_settings
from flexinfer.cli.serve.vllm_flags import OF_SEVERAL, SHORT, SWITCHES
from flexinfer.cli.serve.vllm_line import passed_over
from flexinfer.runtime.vllm_names import OWN_NAMES
from helpers import vllm_snapshot

COMMAND: Any = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]


def options(*arguments: str) -> ServeOptions:
    """What `serve` would be called with."""
    with COMMAND.make_context("serve", list(arguments)) as context:
        return ServeOptions(**context.params)


def refusal(*arguments: str) -> str:
    result = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["serve", *arguments])
    assert result.exit_code == 2
    return " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("line", "model", "keys", "names"),
    [
        ("M --api-key a b --served-model-name x y", "M", ["a", "b"], ["x", "y"]),
        ("--api-key a b --served-model-name x -- M", "M", ["a", "b"], ["x"]),
        ("--api-key a M", "M", ["a"], None),
        ("--api-key a b M", "M", ["a", "b"], None),
        ("--api-key a --api-key b M", "M", ["a", "b"], None),
        ("--api-key a --served-model-name x M --port 8001", "M", ["a"], ["x"]),
        ("--served-model-name x y --port 8001 M --api-key a", "M", ["a"], ["x", "y"]),
        ("--api-key=a M", "M", ["a"], None),
        ("--api_key a b --model M", "M", ["a", "b"], None),
        ("--api-key a", None, ["a"], None),
    ],
)
def test_a_flag_takes_several_values_and_leaves_the_model(
    line: str, model: str | None, keys: list[str], names: list[str] | None
) -> None:
    """Lines that worked with one value each mean what they did."""
    found = options(*line.split())
    assert (found.model, found.api_key, found.served_model_name or None) == (model, keys, names)


def test_every_name_is_served(tmp_path: Path) -> None:
    found = options("M", "--served-model-name", "first", "second", "--enable-lora")
    settings = server_settings(found, engine_config(found))
    assert settings.served_model_names == ("first", "second")
    assert settings.model_name == "first"
    found = options("M", "--enable-lora", "--lora-modules", "x=/a", '{"name": "y", "path": "/b"}')
    modules = server_settings(found, engine_config(found)).lora_modules
    assert [module.name for module in modules] == ["x", "y"]


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("-tp 2", "tensor_parallel_size", 2),
        ("-tp=2", "tensor_parallel_size", 2),
        ("-q int8", "quantization", "int8"),
        ('-sc {"method":"ngram"}', "speculative_config", '{"method":"ngram"}'),
        ("--max_model_len 4k", "max_model_len", "4k"),
        ("--max-model-len -1", "max_model_len", "-1"),
        ("--no_enable_prefix_caching", "enable_prefix_caching", False),
        ("--distributed-timeout-seconds 9", "distributed_timeout", 9.0),
        ("--device-memory-utilization 0.5", "gpu_memory_utilization", 0.5),
        ("--hf-token --port 8001", "hf_token", None),
        ("--hf-token abc", "hf_token", "abc"),
    ],
)
def test_other_spellings_are_read(line: str, name: str, value: Any) -> None:
    assert getattr(options("M", *line.split()), name) == value


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("--block-size 16 --compilation-config={}", "block_size compilation_config"),
        (
            "--no-enable-log-requests -O3 -asc 2",
            "enable_log_requests optimization_level api_server_count",
        ),
        ("--enable-prompt-tokens-details", "enable_prompt_tokens_details"),
        ("--compilation-config.mode 3 -cc.mode 3", "compilation_config compilation_config"),
        ("--cudagraph-capture-sizes 1 2 4 --port 8001", "cuda_graph_sizes"),
        ("-pp 1 --tokenizer-mode auto --no-headless", ""),
        ('--structured-outputs-config {"backend":"auto"} --logits-processors', ""),
    ],
)
def test_what_changes_nothing_is_passed_over(line: str, names: str) -> None:
    with COMMAND.make_context("serve", ["M", *line.split()]) as context:
        assert passed_over() == names.split()
        assert context.params["model"] == "M"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--hf-config-path=a", "no option --hf-config-path: hf_overrides changes values"),
        ("--pipeline-parallel-size 2", "--pipeline-parallel-size: tensor_parallel_size splits"),
        ("-pp 2", "no option --pipeline-parallel-size: tensor_parallel_size splits"),
        ("-dp=2", "no option --data-parallel-size: `flexinfer serve --replicas`"),
        ("--headless", "no option --headless: processes of this machine"),
        ('--structured-outputs-config {"backend":"outlines"}', "llguidance alone does this work"),
        ("--logits-processors a b", "no option --logits-processors: logit_bias"),
        ("--speculative-config.method ngram", "write it as JSON: --speculative-config"),
        ("--skip-tokenizer-init", "a server needs the tokenizer"),
        ("--bogus", "No such option: --bogus"),
    ],
)
def test_what_is_not_served_is_refused_with_what_to_do(line: str, says: str) -> None:
    assert says in refusal("M", *line.split())


def test_what_is_passed_over_is_in_the_log() -> None:
    words = ["M", "--block-size", "16", "--log-format", "json", "--port", "0"]
    result = CliRunner().invoke(app, ["serve", *words])
    (line,) = [line for line in result.stderr.splitlines() if "passed over" in line]
    assert json.loads(line)["message"] == "passed over, for they change no answer: block_size"


def test_a_file_of_vllms_is_read_the_same_way(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: M\ndisable-log-stats: true\npipeline-parallel-size: 1\n"
        "served-model-name: [a, b]\ndistributed-timeout-seconds: 9\nblock_size: 16\n"
    )
    with COMMAND.make_context("serve", ["--config", str(file)]) as context:
        found = ServeOptions(**context.params)
        assert passed_over() == ["disable_log_stats", "block_size"]
    assert (found.model, found.served_model_name) == ("M", ["a", "b"])
    assert found.distributed_timeout == 9
    file.write_text("pipeline-parallel-size: 2\n")
    assert "'pipeline-parallel-size': tensor_parallel_size splits" in refusal("--config", str(file))


OURS = {
    flag.removeprefix("--").replace("-", "_") for param in COMMAND.params for flag in param.opts
}
THEIR_SWITCHES = {*vllm_snapshot.SWITCHES.split()} - OURS
THEIR_LISTS = {*vllm_snapshot.FLAGS_OF_MANY.split()} - OURS
THEIR_OTHERS = {*vllm_snapshot.FLAGS.split()} - OURS


@pytest.mark.parametrize("name", sorted(THEIR_SWITCHES | THEIR_LISTS | THEIR_OTHERS))
def test_no_flag_of_vllms_is_unheard_of(name: str) -> None:
    words = [f"--{name.replace('_', '-')}", *(() if name in THEIR_SWITCHES else ("1",))]
    try:
        options("M", *words)
    except Exception as error:  # typer brings click's along, not always under one name
        told = str(getattr(error, "message", error))
    else:
        told = ""
    assert not told.startswith("No such option")


def test_flags_are_written_as_in_vllm() -> None:
    assert THEIR_SWITCHES <= SWITCHES
    assert {OWN_NAMES.get(name, name) for name in THEIR_LISTS} <= OF_SEVERAL
    assert not (THEIR_LISTS | THEIR_OTHERS) & SWITCHES
    assert not (THEIR_SWITCHES | THEIR_OTHERS) & OF_SEVERAL
    short = {name: flag[2:].replace("-", "_") for name, flag in vllm_snapshot.SHORT_FLAGS.items()}
    assert short.items() <= SHORT.items()
