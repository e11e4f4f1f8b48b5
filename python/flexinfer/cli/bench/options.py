"""The options of `flexinfer bench serve`: one field each, with the names of `vllm bench serve`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from flexinfer.cli.option_model import option
from flexinfer.cli.options import ApiKey


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    panel: ClassVar[str] = "The server"
    backend: Annotated[str, option("openai (completions) or openai-chat.")] = "openai"
    base_url: Annotated[
        str | None, option("Instead of --host and --port.", "--base-url", "--url")
    ] = None
    host: Annotated[str, option()] = "127.0.0.1"
    port: Annotated[int, option()] = 8000
    endpoint: Annotated[str | None, option("Path; by default the backend's.")] = None
    model: Annotated[str | None, option("Served name; by default the first of /v1/models.")] = None
    api_key: ApiKey = None
    header: Annotated[list[str] | None, option("Header as KEY=VALUE; may be repeated.")] = None


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    panel: ClassVar[str] = "Prompts"
    dataset_name: Annotated[str, option("random, custom or trace.")] = "random"
    dataset_path: Annotated[
        Path | None, option("File of custom prompts (JSON lines) or of a trace.")
    ] = None
    num_prompts: Annotated[int, option("How many requests.", min=1)] = 100
    tokenizer: Annotated[
        str | None,
        option(
            "The model's folder: prompts are then exactly as long as asked for; by default they "
            "are words."
        ),
    ] = None
    random_input_len: Annotated[int, option()] = 256
    random_output_len: Annotated[int, option()] = 64
    random_range_ratio: Annotated[float, option("Lengths vary by this fraction, 0 to 1.")] = 0.0
    random_prefix_len: Annotated[int, option("Tokens that all prompts share.")] = 0
    custom_output_len: Annotated[int, option(min=1)] = 256
    trace_time_scale: Annotated[float, option("Factor of a trace's times.")] = 1.0
    trace_length_scale: Annotated[float, option("Factor of a trace's lengths.")] = 1.0
    max_input_len: Annotated[int | None, option("Maximum length of a trace's prompts.", min=1)] = (
        None
    )
    max_output_len: Annotated[int | None, option("Maximum length of a trace's outputs.", min=1)] = (
        None
    )
    ignore_eos: Annotated[bool, option("Outputs exactly as long as asked for.", "--ignore-eos")] = (
        False
    )
    temperature: Annotated[float, option(min=0.0)] = 0.0
    extra_body: Annotated[str | None, option("JSON added to each request.")] = None
    seed: Annotated[int, option("Seed of prompts and arrivals.")] = 0


@dataclass(frozen=True, kw_only=True)
class TrafficOptions:
    panel: ClassVar[str] = "Traffic"
    request_rate: Annotated[
        float, option("Requests per second; inf: all at once, or at a trace's times.")
    ] = math.inf
    burstiness: Annotated[float, option("1: Poisson; less is burstier, more is steadier.")] = 1.0
    max_concurrency: Annotated[int | None, option("Maximum number of requests at once.", min=1)] = (
        None
    )
    num_warmups: Annotated[int, option("Requests sent before, not measured.", min=0)] = 0


@dataclass(frozen=True, kw_only=True)
class ResultOptions:
    panel: ClassVar[str] = "Results"
    goodput: Annotated[
        list[str] | None, option("ttft:MS tpot:MS e2el:MS: count requests that stay within.")
    ] = None
    more_goodput: Annotated[list[str] | None, typer.Argument(hidden=True, metavar="")] = None
    percentile_metrics: Annotated[str, option("Which of ttft, tpot, itl, e2el to show.")] = (
        "ttft,tpot,itl,e2el"
    )
    metric_percentiles: Annotated[str, option("Percentiles to show, such as 90,99.")] = "90,99"
    json: Annotated[bool, option("Print the result as JSON on stdout.", "--json")] = False
    save_result: Annotated[bool, option("Save the result as a file.", "--save-result")] = False
    save_detailed: Annotated[
        bool, option("Save every request in that file too.", "--save-detailed")
    ] = False
    result_dir: Annotated[Path, option()] = Path()
    result_filename: Annotated[str | None, option()] = None
    metadata: Annotated[list[str] | None, option("KEY=VALUE for the result; may be repeated.")] = (
        None
    )
    plot: Annotated[Path | None, option("Draw latencies into this .png, .svg or .pdf.")] = None
    disable_tqdm: Annotated[bool, option("No progress bar.", "--disable-tqdm")] = False


@dataclass(frozen=True, kw_only=True)
class LoadOptions(ResultOptions, TrafficOptions, PromptOptions, TargetOptions):
    """Everything that the command was given; the last base's fields come first in the help."""
