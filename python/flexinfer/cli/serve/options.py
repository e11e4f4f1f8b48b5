"""The options of `flexinfer serve`: one field each. Names are those that vLLM's users know.

A flag goes before its environment variable (FLEXINFER_...), that before the file of --config, and
that before the default. Fields with the names of EngineConfig or ServerSettings reach them by
name; settings.py translates the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from flexinfer.cli.option_model import option
from flexinfer.cli.options import (
    ATTENTION_BACKEND_HELP,
    COMPILE_HELP,
    KV_CACHE_DTYPE_HELP,
    QUANTIZATION_HELP,
    THREADS_HELP,
)
from flexinfer.cli.serve.chat_options import ChatOptions
from flexinfer.cli.serve.config_file import load_config_file
from flexinfer.cli.serve.server_options import LimitOptions, ServerOptions, TLSOptions


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    panel: ClassVar[str] = "Model and engine"
    tokenizer: Annotated[str | None, option("Folder or hub id; by default the model's.")] = None
    revision: Annotated[
        str | None, option("Branch, tag or commit of a hub's repository; by default main.")
    ] = None
    tokenizer_revision: Annotated[
        str | None, option("The same of the tokenizer; by default the model's.")
    ] = None
    download_dir: Annotated[
        str | None, option("Where a hub's files are kept; by default in its own cache.")
    ] = None
    hf_token: Annotated[
        str | None, option("For repositories that not everybody may read; better in HF_TOKEN.")
    ] = None
    load_format: Annotated[
        str, option("auto, safetensors, gguf, or dummy: random weights, of a config alone.")
    ] = "auto"
    trust_remote_code: Annotated[
        bool, option("Changes nothing: no code of a model's repository is run.")
    ] = False
    hf_overrides: Annotated[
        str | None,
        option(
            "Values in place of those of config.json, as JSON: "
            '{"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}.'
        ),
    ] = None
    generation_config: Annotated[
        str,
        option(
            "Defaults of sampling: auto (the model's generation_config.json), vllm (OpenAI's), or "
            "the folder of another one, whose max_new_tokens bounds all answers."
        ),
    ] = "auto"
    override_generation_config: Annotated[
        str | None,
        option('What goes before it, as JSON: {"temperature": 0.6, "top_p": 0.95}.'),
    ] = None
    dtype: Annotated[str, option("float32, bfloat16, float16, or auto (the model's own).")] = "auto"
    quantization: Annotated[str, option(QUANTIZATION_HELP)] = "auto"
    device: Annotated[
        str | None, option("cpu, cuda or cuda:N; by default a GPU if there is one.")
    ] = None
    seed: Annotated[int, option("Seed for requests that give none.")] = 0
    attention_backend: Annotated[str, option(ATTENTION_BACKEND_HELP)] = "auto"
    enforce_eager: Annotated[bool, option("On a GPU: no CUDA graphs for decoding.")] = False
    threads: Annotated[int | None, option(THREADS_HELP)] = None
    compile: Annotated[bool, option(COMPILE_HELP)] = False
    tensor_parallel_size: Annotated[
        int,
        option("Processes that share the model, each with a part of weights and KV heads."),
    ] = 1
    distributed_timeout: Annotated[
        float, option("Seconds after which one of them that does not answer is held to hang.")
    ] = 30.0
    max_model_len: Annotated[
        str | None,
        option(
            "Maximum number of tokens per request, prompt and answer together; also as 8k (8,000) "
            "or 8K (8,192). By default, as by auto or -1, what model and memory allow."
        ),
    ] = None
    tool_call_parser: Annotated[
        str, option("How the model writes its calls, such as llama3_json: docs/server.md.")
    ] = "hermes"
    enable_auto_tool_choice: Annotated[
        bool, option("The model may choose to call a tool; else callers must force it.")
    ] = True
    reasoning_parser: Annotated[
        str | None, option("How the model marks its reasoning, such as qwen3: docs/server.md.")
    ] = None
    enable_force_include_usage: Annotated[
        bool, option("Streams end with their usage, whether they ask for it or not.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    panel: ClassVar[str] = "KV memory"
    kv_cache_dtype: Annotated[str, option(KV_CACHE_DTYPE_HELP)] = "auto"
    gpu_memory_utilization: Annotated[
        float,
        option("Fraction of a GPU for weights, activations and KV, unless the KV's size is given."),
    ] = 0.9
    kv_cache_memory_bytes: Annotated[
        str | None,
        option("Budget of physical KV memory, such as 2GiB; by default half of what is free."),
    ] = None
    chunk_bytes: Annotated[str | None, option("Bytes per physical chunk, such as 2MiB.")] = None
    layers_per_plane: Annotated[
        int | None, option("1: ranges of its own for each layer; by default all side by side.")
    ] = None
    enable_prefix_caching: Annotated[bool, option("Share the KV of equal prefixes.")] = True
    state_snapshot_tokens: Annotated[
        int,
        option(
            "Keep recurrent states for the prefix cache every so many tokens; 0: at the ends of "
            "prompts and turns alone."
        ),
    ] = 1024
    prefix_cache_memory: Annotated[
        str | None,
        option(
            "Bytes that unused prefixes may hold before their memory is reused; by default an "
            "eighth of the budget on the CPU, all of it on CUDA."
        ),
    ] = None
    kv_events_config: Annotated[
        str | None,
        option(
            "Publish which prefixes are cached, for routers, as JSON: "
            '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}. '
            "Needs flexinfer\\[events]: docs/scale_out.md."
        ),
    ] = None
    enable_pre_extend: Annotated[
        bool, option("Map memory ahead of the kernels, in the background.")
    ] = True
    swap_space: Annotated[str, option("Bytes for the KV of swapped requests; 0: none.")] = "0"
    swap_directory: Annotated[
        str | None, option("Where swapped KV goes; by default host memory.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    panel: ClassVar[str] = "LoRA adapters"
    enable_lora: Annotated[bool, option("Requests may choose LoRA adapters: docs/lora.md.")] = False
    lora_modules: Annotated[
        list[str] | None,
        option(
            "NAME=FOLDER of an adapter to serve as the model NAME, or a JSON object with its name, "
            "path and base_model_name; may be given several times."
        ),
    ] = None
    max_loras: Annotated[int, option("Maximum number of adapters in one batch.", min=1)] = 8
    max_lora_rank: Annotated[int, option("Maximum rank of an adapter.", min=1)] = 16


@dataclass(frozen=True, kw_only=True)
class SchedulingOptions:
    panel: ClassVar[str] = "Scheduling"
    max_num_seqs: Annotated[int, option("Maximum number of sequences that run at once.")] = 64
    max_num_batched_tokens: Annotated[
        str | None, option("Maximum number of tokens per step, also as 8k or 8K.")
    ] = None
    stream_interval: Annotated[
        int | None,
        option(
            "Tokens per event of a stream, after the first. By default one with few streams; with "
            "many, the tokens of up to 50 ms, which takes less of the CPU."
        ),
    ] = None
    enable_chunked_prefill: Annotated[bool, option("Split long prompts over several steps.")] = True
    async_scheduling: Annotated[
        bool | None,
        option("Schedule a step while the one before it is computed; by default on a GPU."),
    ] = None
    speculative_config: Annotated[
        str | None,
        option(
            "Propose tokens ahead and verify them together, as JSON: "
            '{"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 4}.'
        ),
    ] = None
    scheduling_policy: Annotated[str, option("fcfs, priority or prefix.")] = "priority"
    preemption_mode: Annotated[str, option("recompute, swap, auto or off.")] = "auto"


@dataclass(frozen=True, kw_only=True)
class ReplicaFlags:
    panel: ClassVar[str] = "Replicas on Ray Serve: needs flexinfer\\[ray], docs/scale_out.md"
    replicas: Annotated[
        int | None, option("So many engines behind one address; by default one, without Ray.")
    ] = None
    router: Annotated[
        str,
        option("Who gets a request: cached-prefix, power-of-two, prefix-affinity, or a class."),
    ] = "cached-prefix"
    ray_address: Annotated[
        str | None, option("Of a Ray cluster, or auto; by default one of this machine's own.")
    ] = None
    autoscaling_config: Annotated[
        str | None,
        option('Ray\'s, as JSON, in place of a number: {"min_replicas": 1, "max_replicas": 4}.'),
    ] = None
    ray_actor_options: Annotated[
        str | None, option('What Ray reserves for each, as JSON: {"num_cpus": 8, "num_gpus": 1}.')
    ] = None


@dataclass(frozen=True, kw_only=True)
class RoleOptions:
    panel: ClassVar[str] = "Prefill here, decode there: docs/scale_out.md"
    role: Annotated[
        str,
        option("prefill: computes prompts for others; decode: has prompts computed; both: alone."),
    ] = "both"
    handover_socket: Annotated[
        Path | None, option("Unix socket where the former listens, and the latter ask.")
    ] = None
    handover_address: Annotated[
        str | None, option("HOST:PORT in its place, between machines; needs --handover-key.")
    ] = None
    handover_key: Annotated[
        str | None, option("Both sides must have the same; better in FLEXINFER_HANDOVER_KEY.")
    ] = None
    handover_timeout: Annotated[
        float, option("Seconds until a prompt that does not come is computed here.")
    ] = 30.0
    handover_min_tokens: Annotated[
        int, option("Prompts with fewer tokens that are not cached are computed here.", min=1)
    ] = 64


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    panel: ClassVar[str] = "Logs and configuration"
    log_format: Annotated[str, option("text or json.")] = "text"
    log_level: Annotated[str, option("debug, info, warning or error.")] = "info"
    otlp_traces_endpoint: Annotated[
        str | None,
        option(
            "OpenTelemetry collector, such as http://localhost:4318/v1/traces, that receives a "
            "span per request; needs flexinfer\\[otel]."
        ),
    ] = None
    config: Annotated[
        Path | None,
        option(
            "YAML file with these options, such as 'max-num-seqs: 16'.",
            callback=load_config_file,
            is_eager=True,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ModelArgument:
    model: Annotated[
        str | None,
        typer.Argument(
            help="Folder, GGUF file or hub id of a causal model; by default the small one shipped.",
            envvar="FLEXINFER_MODEL",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ServeOptions(  # the last base's fields come first in the help
    LogOptions,
    RoleOptions,
    ReplicaFlags,
    LimitOptions,
    TLSOptions,
    ServerOptions,
    SchedulingOptions,
    AdapterOptions,
    MemoryOptions,
    ChatOptions,
    EngineOptions,
    ModelArgument,
):
    """Everything that the command was given."""

    env_prefix: ClassVar[str] = "FLEXINFER_"
