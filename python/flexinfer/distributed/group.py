"""The process group of an engine's ranks: how they find each other, and torch.distributed.

Rank 0 starts the others as processes (the default), or torchrun has started all of them, on one
machine or several. Then each says Hello on a connection of its own and is told its Setup.
"""

from __future__ import annotations

import functools
import gc
import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any

from flexinfer.config import EngineConfig
from flexinfer.distributed.messages import Hello, Setup, fingerprint, versions
from flexinfer.distributed.ranks import Ranks, describe_exit, inherited_environment
from flexinfer.errors import RankError
from flexinfer.runtime.threads import cpu_quota

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""For a rank to load its libraries and connect."""
LOAD_TIMEOUT_S = 7200.0
"""For a rank to load its weights."""
VARIABLE = "FLEXINFER_RANK"
"""Tells a process started here which rank it is, and whom to call."""
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where a rank finds rank 0."""

    rank: int
    host: str
    port: int
    key: str
    """Hexadecimal; whoever does not know it is not listened to."""


def is_launched() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launched_rank(num_ranks: int) -> int:
    """This process's rank under torchrun. Raises ValueError if it has started another number."""
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size != num_ranks:
        raise ValueError(
            f"torchrun has started {world_size} processes, but tensor_parallel_size is {num_ranks}"
        )
    return int(os.environ["RANK"])


def choose_threads_of_rank(threads: int | None, num_ranks: int) -> int:
    """Threads of one of the ranks on this machine; None: an equal part of the cores."""
    num_local = int(os.environ["LOCAL_WORLD_SIZE"]) if is_launched() else num_ranks
    return threads or max(1, cpu_quota().num_cores // num_local)


def start_ranks(config: EngineConfig, threads: int) -> Ranks:
    """Start or find the other ranks, and form the process group with them.

    Raises RankError for one that does not come, or is of another version or model.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        raise ValueError(
            "torch.distributed is in use in this process: a tensor-parallel engine needs it for "
            "itself. Close the other engine first, or run this one in a process of its own"
        )
    num_ranks = config.tensor_parallel_size
    host = os.environ["MASTER_ADDR"] if is_launched() else LOOPBACK
    store = _launched_store() if is_launched() else _new_store(host)
    key = secrets.token_bytes(32)
    processes: dict[int, subprocess.Popen[bytes]] = {}
    with Listener((host, 0), backlog=num_ranks, authkey=key) as listener:
        port = listener.address[1]
        if is_launched():
            store.set("flexinfer", json.dumps([host, port, key.hex()]))
        else:
            for rank in range(1, num_ranks):
                processes[rank] = _spawn(Meeting(rank, host, port, key.hex()))
        try:
            connections = _accept(listener, num_ranks, processes)
            setup = Setup(
                config=replace(config, trace=None),
                fingerprint=fingerprint(config.model),
                num_ranks=num_ranks,
                store=(host, store.port),
                threads=threads,
                timeout_s=config.distributed_timeout_s,
            )
            for connection in connections.values():
                connection.send(setup)
        except BaseException:
            for process in processes.values():
                process.kill()
                process.wait()
            raise
    ranks = Ranks(connections, processes)
    try:
        join_group(store, 0, num_ranks, str(config.device))
    except Exception as error:
        cause = ranks.explain(error)
        ranks.close()
        raise cause from error
    return ranks


def join_group(store: Any, rank: int, num_ranks: int, device: str) -> None:
    """torch.distributed's default group: gloo between CPUs, NCCL between GPUs. While ranks load,
    one may wait long for another."""
    import torch
    import torch.distributed as dist

    if device.startswith("cuda"):
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    with _loopback_of_one_machine():
        dist.init_process_group(
            "nccl" if device.startswith("cuda") else "gloo",
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=LOAD_TIMEOUT_S),
        )


def bound_waiting(timeout_s: float) -> None:
    """From now on a rank that does not take part within this time is held to hang."""
    import torch.distributed as dist

    # Public from torch 2.14 on, where the other is deprecated.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(timedelta(seconds=timeout_s))


def leave_group() -> None:
    """Also after a failure."""
    import torch.distributed as dist

    if dist.is_initialized():
        with suppress(RuntimeError):
            dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """What torch caches of sharded tensors holds on to process groups, and so to their sockets."""
    from torch.distributed.tensor import _redistribute, debug

    debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    getattr(_redistribute, "clear_redistribute_planner_cache", lambda: None)()
    for found in gc.get_objects():
        if type(found) is functools._lru_cache_wrapper:
            module = getattr(found, "__module__", None) or ""
            if module.startswith("torch.distributed"):
                found.cache_clear()


def call_rank_0() -> tuple[Connection, Meeting]:
    """From another rank: the connection to rank 0, Hello said."""
    if VARIABLE in os.environ:
        meeting = Meeting(**json.loads(os.environ.pop(VARIABLE)))
    else:
        host, port, key = json.loads(_launched_store().get("flexinfer"))
        meeting = Meeting(int(os.environ["RANK"]), host, port, key)
    connection = Client((meeting.host, meeting.port), authkey=bytes.fromhex(meeting.key))
    connection.send(Hello(meeting.rank, versions()))
    return connection, meeting


def connect_store(setup: Setup) -> Any:
    """The store of rank 0's machine."""
    import torch.distributed as dist

    host, port = setup.store
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=START_TIMEOUT_S))


def _new_store(host: str) -> Any:
    """It would listen on all interfaces, and asks nobody who he is: here on the host's alone."""
    import torch.distributed as dist

    server = socket.create_server((host, 0))
    port, fd = server.getsockname()[1], server.detach()  # the store's, which closes it
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)


def _launched_store() -> Any:
    import torch.distributed as dist

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = os.environ["RANK"] == "0" and not is_agents
    timeout = timedelta(seconds=START_TIMEOUT_S)
    try:
        store = dist.TCPStore(host, port, None, is_master, timeout, wait_for_workers=False)
    except RuntimeError as error:
        what = "listened on: is the port in use?" if is_master else "reached"
        raise ValueError(f"MASTER_ADDR:MASTER_PORT {host}:{port} cannot be {what}") from error
    return store


def _spawn(meeting: Meeting) -> subprocess.Popen[bytes]:
    # A new interpreter, and no fork or multiprocessing: the caller's main module is none of ours.
    variables = {**inherited_environment(), VARIABLE: json.dumps(vars_of(meeting))}
    return subprocess.Popen(
        [sys.executable, "-m", "flexinfer.distributed.rank"],
        env=variables,
        stdin=subprocess.DEVNULL,
    )


def vars_of(meeting: Meeting) -> dict[str, Any]:
    return {name: getattr(meeting, name) for name in ("rank", "host", "port", "key")}


def _accept(
    listener: Listener, num_ranks: int, processes: dict[int, subprocess.Popen[bytes]]
) -> dict[int, Connection]:
    """A connection to each rank."""
    connections: dict[int, Connection] = {}
    deadline_s = time.monotonic() + START_TIMEOUT_S
    socket: Any = listener._listener._socket  # type: ignore[attr-defined]
    while len(connections) < num_ranks - 1:
        if not wait([socket], 0.2):
            _check_alive(processes, connections, num_ranks, deadline_s)
            continue
        connection = listener.accept()
        assert isinstance(connection, Connection)
        hello = connection.recv()
        assert isinstance(hello, Hello)
        differing = {
            name: other for name, other in hello.versions.items() if other != versions().get(name)
        }
        if differing:
            name, other = next(iter(differing.items()))
            raise RankError(hello.rank, f"has {name} {other}, rank 0 has {versions()[name]}")
        logger.info("rank %d of %d is here", hello.rank, num_ranks)
        connections[hello.rank] = connection
    return connections


def _check_alive(
    processes: dict[int, subprocess.Popen[bytes]],
    connections: dict[int, Connection],
    num_ranks: int,
    deadline_s: float,
) -> None:
    for rank, process in processes.items():
        code = process.poll()
        if code is not None:
            raise RankError(rank, f"{describe_exit(code)} before it was ready")
    if time.monotonic() > deadline_s:
        missing = next(rank for rank in range(1, num_ranks) if rank not in connections)
        raise RankError(missing, f"has not come within {START_TIMEOUT_S:g} s")


@contextmanager
def _loopback_of_one_machine() -> Iterator[None]:
    """gloo between processes of one machine listens where only this machine can call."""
    name = "GLOO_SOCKET_IFNAME"
    if is_launched() or name in os.environ:
        yield
        return
    os.environ[name] = "lo"
    try:
        yield
    finally:
        del os.environ[name]
