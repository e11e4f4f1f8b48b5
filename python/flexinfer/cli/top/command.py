"""`flexinfer top`: a server's requests, memory and latencies, live at the terminal."""

from __future__ import annotations

import json as json_module
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from flexinfer.cli.errors import usage_errors
from flexinfer.cli.options import ApiKey, Url

if TYPE_CHECKING:
    from flexinfer.cli.endpoint import Endpoint
    from flexinfer.cli.top.sample import Sample


def top(
    url: Url = None,
    api_key: ApiKey = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show it once and end.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="A line of JSON for each look; with --once, one.")
    ] = False,
) -> None:
    """Watch a server: requests, memory, hit rate, exposed mapping time. Ctrl-C ends."""
    with usage_errors():
        from flexinfer.cli.endpoint import DEFAULT_URL, Endpoint

        with Endpoint(url or DEFAULT_URL, api_key) as endpoint:
            before = _look(endpoint)
            if once:
                _show_once(before, as_json=json)
                return
            with suppress(KeyboardInterrupt):
                _watch(endpoint, before, interval, as_json=json)


def _look(endpoint: Endpoint) -> Sample:
    from flexinfer.cli.top.sample import Sample

    return Sample.parse(endpoint.get_text("/metrics"), time.time())


def _show_once(sample: Sample, *, as_json: bool) -> None:
    """Rates are means since the server's start."""
    from flexinfer.cli.top.view import view

    if as_json:
        typer.echo(json_module.dumps(sample.numbers(None), indent=2))
        return
    from rich.console import Console

    Console().print(view(sample, None))


def _watch(endpoint: Endpoint, before: Sample, interval: float, *, as_json: bool) -> None:
    """Until Ctrl-C, until the server is gone (EndpointError), or nobody reads any more."""
    if as_json:
        for now, last in _looks(endpoint, before, interval):
            typer.echo(json_module.dumps(now.numbers(last)))
        return
    from rich.console import Console
    from rich.live import Live

    from flexinfer.cli.top.view import view

    console = Console()
    if not console.is_interactive:  # Live would keep everything back until the end
        console.print(view(before, None))
        for now, last in _looks(endpoint, before, interval):
            console.print("", view(now, last), sep="\n")
        return
    with Live(view(before, None), console=console, screen=False, auto_refresh=False) as live:
        for now, last in _looks(endpoint, before, interval):
            live.update(view(now, last), refresh=True)


def _looks(endpoint: Endpoint, before: Sample, interval: float) -> Iterator[tuple[Sample, Sample]]:
    """Each look, with the one before it."""
    while True:
        time.sleep(interval)
        now = _look(endpoint)
        yield now, before
        before = now
