"""`flexinfer serve --replicas`: a cluster, the application in it, and the wait for a signal."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flexinfer.ray.options import NEED_RAY, ReplicaOptions
from flexinfer.server.run import bind

logger = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 256 << 20
"""Of a cluster that is started here: requests and answers alone pass through it."""


def serve_replicas(
    options: ReplicaOptions,
    address: str | None,
    http_options: dict[str, Any],
    on_ready: Callable[[], None],
) -> None:
    """Serve until SIGINT or SIGTERM. `address`: of a Ray cluster; None: one of this machine's own,
    which ends with it. Raises ImportError without Ray, OSError for a port that is taken."""
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise ModuleNotFoundError(f"{NEED_RAY} ({error})", name="ray") from None

    from flexinfer.ray.app import build

    server = options.server
    bind(server.host, server.port).close()
    if address is None:
        options = _shared(options)
    app = build(options)
    if address is None:
        cpus = max(os.cpu_count() or 1, _num_ranks(options) * (options.engine.threads or 1))
        store = OBJECT_STORE_BYTES
        ray.init("local", num_cpus=cpus, object_store_memory=store, include_dashboard=False)
    else:
        ray.init(address)
    try:
        with _signals() as stopped:
            idle_s = server.timeout_keep_alive
            own = {"host": server.host, "port": server.port, "keep_alive_timeout_s": idle_s}
            serve.start(http_options=own | http_options)
            serve.run(app, name="flexinfer", route_prefix="/")
            on_ready()
            stopped.wait()
        logger.info("shutting down: requests have %g s to end", server.shutdown_timeout_s)
        serve.shutdown() if address is None else serve.delete("flexinfer")
    finally:
        ray.shutdown()


def _shared(options: ReplicaOptions) -> ReplicaOptions:
    """This machine's cores and memory, divided among the replicas' ranks."""
    from flexinfer.vtensor import available_memory_bytes

    engine = options.engine
    given: dict[str, Any] = {}
    if engine.threads is None:
        given["threads"] = max(1, (os.cpu_count() or 1) // _num_ranks(options))
    if engine.kv_cache_memory_bytes is None and not str(engine.device or "").startswith("cuda"):
        given["kv_cache_memory_bytes"] = available_memory_bytes() // 2 // _num_ranks(options)
    return dataclasses.replace(options, engine=dataclasses.replace(engine, **given))


def _num_ranks(options: ReplicaOptions) -> int:
    return options.replicas * options.engine.tensor_parallel_size


@contextmanager
def _signals() -> Iterator[threading.Event]:
    """Set by the first signal; a second one ends the process as usual."""
    stopped = threading.Event()
    handled = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in handled}

    def stop(number: int, frame: object) -> None:
        stopped.set()
        for one, handler in before.items():
            signal.signal(one, handler)

    for number in handled:
        signal.signal(number, stop)
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
