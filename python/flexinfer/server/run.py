"""Runs an app under uvicorn until a signal: drain, then end what still runs, then stop; a second
signal means now."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import signal
import socket
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI

from flexinfer.server.handover.socket_path import bind as bind_path
from flexinfer.server.settings import ServerSettings
from flexinfer.server.state import ServerState

logger = logging.getLogger(__name__)

ENGINE_FAILED = 1
"""Exit code when the engine has died."""
WATCH_INTERVAL_S = 0.5
WAYS_OUT = {
    errno.EADDRINUSE: "; name another --port",
    errno.EADDRNOTAVAIL: "; --host takes an address of this machine, or 0.0.0.0 for all of them",
}
ENDING_S = 2.0
"""For answers to requests that are ended: a step may be under way, and readers may be slow."""


class Server(uvicorn.Server):
    """Signals are ours: the first one drains, whatever it is, the second one ends at once."""

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config)
        self._state = state
        self._hurry = asyncio.Event()
        self.exit_code = 0

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        handled = (signal.SIGINT, signal.SIGTERM)
        for number in handled:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """Drain; called again: end now what runs."""
        if self.should_exit:
            logger.warning("stopping at once")
            self._hurry.set()
        else:
            active = self._state.limits.num_active
            logger.info("shutting down: %d sequences are still being served", active)
        self._state.is_draining = True
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.ensure_future(self._end_in_time())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_in_time(self) -> None:
        """What has not ended is answered so, then disconnected: for an app that is a client who
        goes. uvicorn would cancel its tasks: a traceback and a plain 500 for each."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), self._state.settings.shutdown_timeout_s)
        logger.warning("ending %d sequences", self._state.limits.num_active)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._state.end_requests(), ENDING_S)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        self.force_exit = self._hurry.is_set()

    async def watch_engine(self) -> None:
        """A dead engine cannot be served from: go down, so that a supervisor starts anew."""
        while self._state.llm.is_running:
            await asyncio.sleep(WATCH_INTERVAL_S)
        if not self.should_exit:
            logger.critical("the engine has stopped: the server goes down")
            self.exit_code = ENGINE_FAILED
            self.stop()


def serve(app: FastAPI, sock: socket.socket) -> int:
    """Serve on a socket of `listen`; returns the exit code. The engine is left running."""
    state: ServerState = app.state.flexinfer
    tls = state.settings.tls
    config = uvicorn.Config(
        app,
        http=_protocol(state.settings.receive_timeout_s),
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_keep_alive=state.settings.timeout_keep_alive,
        **({} if tls is None else tls.uvicorn_options()),
    )
    server = Server(config, state)
    # What is there now stays: each full collection would walk it, with everybody waiting.
    gc.collect()
    gc.freeze()

    async def main() -> None:
        watch = asyncio.ensure_future(server.watch_engine())
        try:
            await server.serve(sockets=[sock])
        finally:
            watch.cancel()

    try:
        _run(main())
    finally:
        gc.unfreeze()
    return server.exit_code


def _protocol(receive_timeout_s: float) -> Any:
    """The HTTP protocol that ends slow requests, where its parser is installed."""
    try:
        from flexinfer.server.http.connection import Connection
    except ImportError:
        logger.warning("httptools is not installed: requests may arrive as slowly as they like")
        return "auto"
    return partial(Connection, receive_timeout_s=receive_timeout_s)


def _run(main: Coroutine[Any, Any, None]) -> None:
    """On uvloop where it is installed: an event costs a third less there."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


@contextmanager
def bound(settings: ServerSettings) -> Iterator[tuple[socket.socket, ServerSettings]]:
    """A socket of `bind`, or one at `uds`, and the settings with the port that it got; see
    `listen`. Raises OSError, and ValueError for a path where none can be."""
    if settings.uds is None:
        with bind(settings.host, settings.port) as sock:
            host, port = sock.getsockname()[:2]
            yield sock, replace(settings, host=host, port=port)
        return
    with bind_path(settings.uds, "uds") as sock:
        try:
            yield sock, settings
        finally:
            settings.uds.unlink(missing_ok=True)


def bind(host: str, port: int) -> socket.socket:
    """A listening address, taken before the model is loaded; see `listen`. Raises OSError with the
    address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except BaseException as error:
        sock.close()
        if isinstance(error, OSError):
            raise _with_address(error, host, port) from error
        raise
    return sock


def listen(sock: socket.socket) -> None:
    """Let clients connect to a socket of `bind` or `bound`. Raises OSError with the address: two
    servers can be bound to one until the first listens, and uvloop passes over that error of the
    other's."""
    try:
        sock.listen()
    except OSError as error:
        if sock.family is socket.AF_UNIX:
            raise
        raise _with_address(error, *sock.getsockname()[:2]) from error


def _with_address(error: OSError, host: str, port: int) -> OSError:
    way_out = WAYS_OUT.get(error.errno or 0, "")
    return OSError(f"cannot listen on {host}:{port}: {error.strerror}{way_out}")
