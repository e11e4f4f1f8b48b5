"""`flexinfer serve`: the OpenAI-compatible server. Flags have the names that vLLM users know.

A flag goes before its environment variable (FLEXINFER_...), that before the file of --config, and
that before the default.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from flexinfer.cli.config_file import load_config_file
from flexinfer.cli.errors import usage_errors
from flexinfer.cli.options import COMPILE_HELP, THREADS_HELP
from flexinfer.cli.serve_settings import engine_config, server_settings

logger = logging.getLogger(__name__)

ENGINE = "Model and engine"
MEMORY = "KV memory"
SCHEDULING = "Scheduling"
SERVER = "Server"
TLS = "HTTPS"
LIMITS = "Limits"
LOGS = "Logs and configuration"


def _option(panel: str, name: str, text: str, **settings: Any) -> Any:
    """An option with its environment variable."""
    variable = "FLEXINFER_" + name.split("/")[0].lstrip("-").replace("-", "_").upper()
    return typer.Option(
        name,
        help=text,
        rich_help_panel=panel,
        envvar=variable,
        show_envvar=False,  # the command's own text says how they are called
        **settings,
    )


def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Folder or hub id of a causal model; without it, the small one shipped.",
            envvar="FLEXINFER_MODEL",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, _option(ENGINE, "--tokenizer", "Folder or hub id; without it, the model's.")
    ] = None,
    dtype: Annotated[
        str, _option(ENGINE, "--dtype", "float32, bfloat16, float16, or auto (the model's own).")
    ] = "auto",
    device: Annotated[
        str | None,
        _option(ENGINE, "--device", "cpu, cuda or cuda:N; without it, a GPU if there is one."),
    ] = None,
    seed: Annotated[int, _option(ENGINE, "--seed", "Of requests without a seed.")] = 0,
    attention_backend: Annotated[
        str,
        _option(ENGINE, "--attention-backend", "auto, flash, host, sdpa: docs/cuda.md."),
    ] = "auto",
    enforce_eager: Annotated[
        bool,
        _option(
            ENGINE, "--enforce-eager/--no-enforce-eager", "On a GPU: no CUDA graphs for decoding."
        ),
    ] = False,
    gpu_memory_utilization: Annotated[
        float,
        _option(
            MEMORY,
            "--gpu-memory-utilization",
            "Part of a GPU for weights, activations and KV, unless the KV's bytes are given.",
        ),
    ] = 0.9,
    threads: Annotated[int | None, _option(ENGINE, "--threads", THREADS_HELP)] = None,
    compile_model: Annotated[bool, _option(ENGINE, "--compile/--no-compile", COMPILE_HELP)] = False,
    max_model_len: Annotated[
        int | None,
        _option(ENGINE, "--max-model-len", "Most tokens of one request, prompt and answer."),
    ] = None,
    chat_template: Annotated[
        str | None,
        _option(ENGINE, "--chat-template", "Jinja file or text, in place of the tokenizer's."),
    ] = None,
    kv_cache_memory: Annotated[
        str | None,
        _option(
            MEMORY,
            "--kv-cache-memory-bytes",
            "Budget of physical KV memory, such as 2GiB; without it, half of what is free.",
        ),
    ] = None,
    chunk_bytes: Annotated[
        str | None, _option(MEMORY, "--chunk-bytes", "Bytes of one physical chunk, such as 2MiB.")
    ] = None,
    layers_per_plane: Annotated[
        int | None,
        _option(MEMORY, "--layers-per-plane", "1: each layer in ranges of its own; else all."),
    ] = None,
    enable_prefix_caching: Annotated[
        bool,
        _option(
            MEMORY,
            "--enable-prefix-caching/--no-enable-prefix-caching",
            "Share the KV of equal prefixes.",
        ),
    ] = True,
    prefix_cache_memory: Annotated[
        str | None,
        _option(
            MEMORY,
            "--prefix-cache-memory",
            "Bytes that prefixes may hold which nobody uses, before their memory is reused; "
            "without it, an eighth of the budget on the CPU, all of it on CUDA.",
        ),
    ] = None,
    enable_pre_extend: Annotated[
        bool,
        _option(
            MEMORY,
            "--enable-pre-extend/--no-enable-pre-extend",
            "Map memory ahead of the kernels, in the background.",
        ),
    ] = True,
    swap_space: Annotated[
        str, _option(MEMORY, "--swap-space", "Bytes for the KV of swapped requests; 0: none.")
    ] = "0",
    swap_directory: Annotated[
        str | None,
        _option(MEMORY, "--swap-directory", "Where swapped KV goes; without it, host memory."),
    ] = None,
    max_num_seqs: Annotated[
        int, _option(SCHEDULING, "--max-num-seqs", "Most sequences that run at the same time.")
    ] = 64,
    max_num_batched_tokens: Annotated[
        int | None,
        _option(SCHEDULING, "--max-num-batched-tokens", "Most tokens that one step computes."),
    ] = None,
    stream_interval: Annotated[
        int | None,
        _option(
            SCHEDULING,
            "--stream-interval",
            "Tokens in one event of a stream, after the first. Without it one with few streams, "
            "with many those of up to 100 ms, which takes less of the CPU.",
        ),
    ] = None,
    enable_chunked_prefill: Annotated[
        bool,
        _option(
            SCHEDULING,
            "--enable-chunked-prefill/--no-enable-chunked-prefill",
            "Split long prompts over several steps.",
        ),
    ] = True,
    scheduling_policy: Annotated[
        str, _option(SCHEDULING, "--scheduling-policy", "fcfs, priority or prefix.")
    ] = "priority",
    preemption_mode: Annotated[
        str, _option(SCHEDULING, "--preemption-mode", "recompute, swap, auto or off.")
    ] = "auto",
    host: Annotated[
        str, _option(SERVER, "--host", "Address to listen on; 0.0.0.0 for all.")
    ] = "127.0.0.1",
    port: Annotated[int, _option(SERVER, "--port", "0 takes a free one.", min=0, max=65535)] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        _option(SERVER, "--served-model-name", "Name in requests; may be given several times."),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        _option(
            SERVER,
            "--api-key",
            "Key that requests must have; several keys are several tenants. Better in the "
            "environment or the file: other users of this machine see arguments.",
        ),
    ] = None,
    admin_api_key: Annotated[
        str | None, _option(SERVER, "--admin-api-key", "Turns /admin on, for who has this key.")
    ] = None,
    allowed_origins: Annotated[
        list[str] | None,
        _option(
            SERVER,
            "--allowed-origins",
            "Origin of a web page that may call (CORS); several times, or a JSON list.",
        ),
    ] = None,
    allowed_methods: Annotated[
        list[str] | None,
        _option(SERVER, "--allowed-methods", "That such pages may use; without it, all."),
    ] = None,
    allowed_headers: Annotated[
        list[str] | None,
        _option(SERVER, "--allowed-headers", "That such pages may send; without it, all."),
    ] = None,
    allow_credentials: Annotated[
        bool,
        _option(
            SERVER,
            "--allow-credentials/--no-allow-credentials",
            "Such pages may send cookies and certificates.",
        ),
    ] = False,
    ssl_keyfile: Annotated[
        Path | None, _option(TLS, "--ssl-keyfile", "Its key, if that is a file of its own.")
    ] = None,
    ssl_certfile: Annotated[
        Path | None, _option(TLS, "--ssl-certfile", "Certificate (PEM); turns HTTPS on.")
    ] = None,
    ssl_ca_certs: Annotated[
        Path | None,
        _option(TLS, "--ssl-ca-certs", "Authorities of the certificates that callers show."),
    ] = None,
    ssl_cert_reqs: Annotated[
        int,
        _option(TLS, "--ssl-cert-reqs", "Callers show no certificate (0), may (1), must (2)."),
    ] = 0,
    trace_dir: Annotated[
        Path | None,
        _option(SERVER, "--trace-dir", "Where /admin/trace writes.", exists=True, file_okay=False),
    ] = None,
    shutdown_timeout: Annotated[
        float, _option(SERVER, "--shutdown-timeout", "Seconds to drain in; then stop.", min=0)
    ] = 30.0,
    max_queue_len: Annotated[
        int,
        _option(LIMITS, "--max-queue-len", "Sequences that may wait; more get 429.", min=0),
    ] = 256,
    max_key_concurrency: Annotated[
        int | None,
        _option(LIMITS, "--max-key-concurrency", "Most sequences of one API key at once.", min=1),
    ] = None,
    max_request_bytes: Annotated[
        str, _option(LIMITS, "--max-request-bytes", "Largest body of a request.")
    ] = "8MiB",
    max_prompt_tokens: Annotated[
        int | None, _option(LIMITS, "--max-prompt-tokens", "Longest prompt.", min=1)
    ] = None,
    max_n: Annotated[
        int | None, _option(LIMITS, "--max-n", "Most samples of one prompt.", min=1)
    ] = None,
    max_logprobs: Annotated[
        int, _option(LIMITS, "--max-logprobs", "Most log probabilities a token.", min=1)
    ] = 20,
    max_conversations: Annotated[
        int, _option(LIMITS, "--max-conversations", "Most conversations kept pinned.", min=1)
    ] = 1024,
    conversation_ttl: Annotated[
        float, _option(LIMITS, "--conversation-ttl", "Seconds that an idle one is kept.", min=1)
    ] = 600.0,
    send_timeout: Annotated[
        float, _option(LIMITS, "--send-timeout", "Seconds until a stuck reader is cut.", min=1)
    ] = 60.0,
    log_format: Annotated[str, _option(LOGS, "--log-format", "text or json.")] = "text",
    log_level: Annotated[
        str, _option(LOGS, "--log-level", "debug, info, warning or error.")
    ] = "info",
    otlp_traces_endpoint: Annotated[
        str | None,
        _option(
            LOGS,
            "--otlp-traces-endpoint",
            "OpenTelemetry collector, such as http://localhost:4318/v1/traces, that gets a span a "
            "request; needs flexinfer[otel].",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        _option(
            LOGS,
            "--config",
            "YAML file with these options, such as 'max-num-seqs: 16'.",
            callback=load_config_file,
            is_eager=True,
        ),
    ] = None,
) -> None:
    """Serve a model by OpenAI's HTTP interface, with a page at / and metrics at /metrics.

    Every option may stand in the environment: FLEXINFER_MAX_NUM_SEQS for --max-num-seqs.
    """
    given = dict(locals())
    with usage_errors():
        _run(given)


def _run(given: dict[str, Any]) -> None:
    """Take the address, load the model, serve. Raises ValueError or OSError for what can not be."""
    from flexinfer.server.observability.logs import configure_logging

    if given["log_format"] not in ("text", "json"):
        raise ValueError(f"log format must be text or json, got {given['log_format']!r}")
    configure_logging(given["log_format"], given["log_level"])
    if given["log_format"] == "json" or not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # bars are no lines of a log
    config = engine_config(given)
    settings = server_settings(given, config)

    from flexinfer.server.run import bind

    with bind(settings.host, settings.port) as sock:
        host, port = sock.getsockname()[:2]
        settings = dataclasses.replace(settings, host=host, port=port)
        from flexinfer.async_llm import AsyncLLM
        from flexinfer.server.app import create_app
        from flexinfer.server.observability.logs import adopt_transformers
        from flexinfer.server.run import serve

        adopt_transformers()
        llm = AsyncLLM.from_engine_args(config)
        try:
            app = create_app(llm, settings)
            url = url_of(host, port, is_tls=settings.tls is not None)
            _announce(f"Serving {settings.model_name} at {url}", given)
            code = serve(app, sock)
        finally:
            llm.shutdown()
    if code:
        raise typer.Exit(code)


def _announce(text: str, given: dict[str, Any]) -> None:
    """Where the server is: for a person at any log level, or one more line of JSON."""
    if given["log_format"] == "json":
        logger.info(text)
    else:
        typer.echo(text, err=True)


def url_of(host: str, port: int, *, is_tls: bool = False) -> str:
    scheme = "https" if is_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
