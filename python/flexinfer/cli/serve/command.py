"""`flexinfer serve`: the OpenAI-compatible server."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING

import typer

from flexinfer.cli.errors import usage_errors
from flexinfer.cli.serve.options import ServeOptions
from flexinfer.cli.serve.replicas import replica_options, replicas_wanted
from flexinfer.cli.serve.settings import engine_config, server_settings
from flexinfer.cli.serve.vllm_line import passed_over

if TYPE_CHECKING:
    from flexinfer.config import EngineConfig
    from flexinfer.server.settings import ServerSettings

logger = logging.getLogger(__name__)


def serve(options: ServeOptions) -> None:
    """Serve a model by OpenAI's HTTP interface, with a page at / and metrics at /metrics.

    Every option can be set in the environment: FLEXINFER_MAX_NUM_SEQS for --max-num-seqs.
    """
    with usage_errors():
        _have_stderr()
        _run(options)


def _have_stderr() -> None:
    """Where it is closed (`2>&-`), what is logged goes nowhere. Opened this early it is file 2
    itself; else a socket could be, and C libraries would write their complaints into it."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  for as long as we run


def _run(options: ServeOptions) -> None:
    """Take the address, load the model, serve. Raises ValueError or OSError."""
    from flexinfer.runtime.vllm_arguments import note_passed_over
    from flexinfer.server.observability.logs import configure_logging

    if options.log_format not in ("text", "json"):
        raise ValueError(f"log format must be text or json, got {options.log_format!r}")
    configure_logging(options.log_format, options.log_level)  # type: ignore[arg-type]
    if options.log_format == "json" or not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # bars are not lines of a log
    note_passed_over(passed_over())
    config = engine_config(options)
    settings = server_settings(options, config)
    if replicas_wanted(options):
        _run_replicas(options, config, settings)
        return

    import asyncio

    from flexinfer.runtime.process import check_threads, num_server_threads
    from flexinfer.server.run import bound

    endpoint = settings.handover_endpoint
    if settings.role == "prefill" and endpoint is not None:
        endpoint.check_free()

    check_threads(config.threads, num_server_threads())
    with bound(settings) as (sock, settings):
        from flexinfer.async_llm import AsyncLLM
        from flexinfer.server.app import create_app
        from flexinfer.server.observability.logs import adopt_transformers
        from flexinfer.server.run import listen, serve

        adopt_transformers()
        llm = AsyncLLM.from_engine_args(config)
        try:
            app = create_app(llm, settings)
            asyncio.run(app.state.flexinfer.adapters.load_all(settings.lora_modules))
            _let_go_of_what_starting_needed()
            listen(sock)
            _announce(f"Serving {settings.model_name} at {_place(settings)}", options)
            code = serve(app, sock)
        finally:
            llm.shutdown()
    if code:
        raise typer.Exit(code)


def _let_go_of_what_starting_needed() -> None:
    """Memory that is free, and pages of libraries: after loading, imports and a warm-up came."""
    import gc

    from flexinfer.runtime.library_pages import let_go_of_library_pages
    from flexinfer.runtime.malloc import return_freed_memory

    gc.collect()
    return_freed_memory()
    let_go_of_library_pages()


def _run_replicas(options: ServeOptions, config: EngineConfig, settings: ServerSettings) -> None:
    """The same behind one address on Ray Serve. Raises ValueError, ImportError or OSError."""
    from flexinfer.ray.run import serve_replicas

    http_options = {"ssl_keyfile": options.ssl_keyfile, "ssl_certfile": options.ssl_certfile}
    serve_replicas(
        replica_options(options, config, settings),
        options.ray_address,
        {name: str(path) for name, path in http_options.items() if path is not None},
        lambda: _announce(f"Serving {settings.model_name} at {_place(settings)}", options),
    )


def _announce(text: str, options: ServeOptions) -> None:
    """Where the server is: for a person at any log level, or one more line of JSON."""
    if options.log_format == "json":
        logger.info(text)
    else:
        typer.echo(text, err=True)


def _place(settings: ServerSettings) -> str:
    if settings.uds is not None:
        return f"unix:{settings.uds}"
    return url_of(settings.host, settings.port, is_tls=settings.tls is not None)


def url_of(host: str, port: int, *, is_tls: bool = False) -> str:
    scheme = "https" if is_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
