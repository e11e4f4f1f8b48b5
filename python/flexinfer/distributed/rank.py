"""A rank: what the processes beside rank 0 run, which do as it says until it says Stop, or is gone.

`python -m flexinfer.distributed.rank` is started by rank 0; under torchrun `serve_rank` is called
where rank 0 would make its engine.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from flexinfer.distributed.group import (
    bound_waiting,
    call_rank_0,
    connect_store,
    join_group,
    leave_group,
)
from flexinfer.distributed.messages import (
    Done,
    Failed,
    Loaded,
    OpenManager,
    Probe,
    Setup,
    Step,
    StepFailed,
    Stop,
    fingerprint,
)
from flexinfer.distributed.operations import Replica
from flexinfer.errors import VTensorError

if TYPE_CHECKING:
    from flexinfer.config import EngineConfig
    from flexinfer.layers.exchanges import Exchanges
    from flexinfer.runner.model_runner import ModelRunner
    from flexinfer.runner.plan import StepPlan
    from flexinfer.vtensor import VTensorManager

logger = logging.getLogger(__name__)
POLL_S = 1.0


def serve_rank(config: EngineConfig | None = None) -> None:
    """Be a rank of the engine that rank 0 makes; returns when that is closed.

    config: this rank's own, where it was given one: its model's folder may be another one.
    """
    for kind in (signal.SIGINT, signal.SIGTERM):
        # Ctrl-C and systemd reach rank 0 too, which ends us when its requests have ended.
        signal.signal(kind, signal.SIG_IGN)
    end_with_parent()
    connection, meeting = call_rank_0()
    try:
        setup = connection.recv()
        if isinstance(setup, Setup):
            _serve(connection, meeting.rank, setup, config)
    except (EOFError, ConnectionError):
        logger.debug("rank 0 has gone", exc_info=True)
    except Exception as error:
        from flexinfer.layers.exchanges import CollectiveError

        logger.debug("rank %d fails", meeting.rank, exc_info=True)
        is_victim = isinstance(error, CollectiveError)
        in_words = isinstance(error, VTensorError)
        why = str(error) if in_words else f"{type(error).__name__}: {error}".rstrip(": ")
        _tell(connection, Failed(f"failed: {why}", is_victim))
    finally:
        connection.close()
        leave_group()


def end_with_parent() -> None:
    """Have this process end soon after the one that has started it: while it waits for the others
    to meet, it would not learn for two minutes that rank 0 has gone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _serve(
    connection: Connection, rank: int, setup: Setup, own_config: EngineConfig | None
) -> None:
    from flexinfer.models.loading import load_part_of_model
    from flexinfer.models.sharding import RankOf
    from flexinfer.runtime.torch_settings import set_up_torch

    set_up_torch(setup.threads)
    config = setup.config
    if own_config is not None:
        config = replace(config, model=own_config.model)
    if fingerprint(config.model) != setup.fingerprint:
        raise ValueError(f"the model {str(config.model)!r} is not the one that rank 0 has")
    device = rank_device(str(config.device), rank)
    store = connect_store(setup)
    join_group(store, rank, setup.num_ranks, device)
    start_s = time.perf_counter()
    part = RankOf(rank, setup.num_ranks)
    model, num_bytes = load_part_of_model(config, device, part)
    seconds = time.perf_counter() - start_s
    connection.send(Loaded(num_bytes, seconds))
    connection.send(Done())
    runner, manager = _open(connection, config, model, setup.timeout_s)
    try:
        _follow(connection, runner, Replica(manager._core))
    finally:
        manager.close()


def _open(
    connection: Connection, config: EngineConfig, model: Any, timeout_s: float
) -> tuple[ModelRunner, VTensorManager]:
    """What computes this rank's part, and its own manager, when all ranks have their weights."""
    from flexinfer.memory.budget import KVMemory
    from flexinfer.memory.kv_setup import make_manager
    from flexinfer.models.describe import describe
    from flexinfer.runner.model_runner import ModelRunner
    from flexinfer.sampling.grammars import GrammarCompiler

    _expect(connection, Probe)
    loaded = describe(model, str(config.model))
    opening = _expect(connection, OpenManager)
    memory = KVMemory(opening.budget_bytes, "as rank 0")
    manager = make_manager(config, loaded, opening.max_seq_len, memory)
    grammars = GrammarCompiler(None, loaded.vocab_size, loaded.eos_token_ids)
    runner = ModelRunner(
        loaded,
        manager,
        config.attention_backend,
        config.seed,
        grammars,
        compile_model=config.compile,
        kv_cache_dtype=config.kv_cache_dtype,
        pads_rows=opening.pads_rows,
    )
    runner.compile_ahead()
    bound_waiting(timeout_s)
    connection.send(Done())
    return runner, manager


def _expect(connection: Connection, kind: type) -> Any:
    """The next message. Raises EOFError if it is another one: Stop."""
    message = connection.recv()
    if not isinstance(message, kind):
        raise EOFError
    return message


def _follow(connection: Connection, runner: ModelRunner, replica: Replica) -> None:
    from flexinfer.layers.exchanges import exchanges_of

    exchanges = exchanges_of(runner.loaded.model)
    while True:
        message: Any = connection.recv()
        if isinstance(message, Stop):
            return
        assert isinstance(message, Step)
        for operation in message.operations:
            replica.apply(operation)
        if message.books is not None:
            replica.check(message.books)
        if message.plan is not None:
            why = _compute(runner, exchanges, message.plan)
            if why:
                connection.send(StepFailed(message.number, why))
        if message.is_answered:
            connection.send(Done())


def _compute(runner: ModelRunner, exchanges: Exchanges, plan: StepPlan) -> str:
    """This rank's part of a step; returns why it failed, or nothing. Raises CollectiveError."""
    import torch

    from flexinfer.distributed.executor import compute_part
    from flexinfer.layers.exchanges import CollectiveError

    try:
        compute_part(runner, exchanges, plan)
        if runner.loaded.device.type == "cuda":
            torch.cuda.synchronize(runner.loaded.device)  # as rank 0, which reads tokens
    except CollectiveError:
        raise
    except Exception as error:
        logger.debug("a part of a step has failed", exc_info=True)
        return f"failed in its part of a step: {type(error).__name__}: {error}"
    return ""


def rank_device(device: str, rank: int) -> str:
    """Where this rank's part of the model is."""
    if not device.startswith("cuda"):
        return device
    return f"cuda:{os.environ.get('LOCAL_RANK', rank)}"


def _tell(connection: Connection, message: object) -> None:
    try:
        connection.send(message)
    except OSError:
        logger.debug("rank 0 has gone", exc_info=True)


if __name__ == "__main__":
    serve_rank()
    os._exit(0)  # the system is quicker than torch at giving back what this process holds
