"""TensorParallelRanks: what the engine of rank 0 does for and with the other ranks, from start to
end. Imports torch late.

    start   the plan is checked, ranks come, the process group is formed
    load    all ranks read their parts at the same time
    open    all ranks open a manager with the same settings; from now on operations are recorded
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from flexinfer.config import EngineConfig
from flexinfer.distributed.group import (
    LOAD_TIMEOUT_S,
    bound_waiting,
    choose_threads_of_rank,
    is_launched,
    launched_rank,
    leave_group,
    start_ranks,
)
from flexinfer.distributed.messages import Loaded, OpenManager, Probe
from flexinfer.distributed.operations import record_operations

if TYPE_CHECKING:
    from flexinfer.distributed.executor import TensorParallelExecutor
    from flexinfer.memory.budget import KVMemory
    from flexinfer.models.describe import LoadedModel
    from flexinfer.runner.model_runner import ModelRunner
    from flexinfer.vtensor import VTensorManager


def rank_threads(config: EngineConfig) -> int | None:
    """Threads of this process; None leaves the choice to it."""
    if config.tensor_parallel_size == 1:
        return config.threads
    return choose_threads_of_rank(config.threads, config.tensor_parallel_size)


class TensorParallelRanks:
    """
    Under torchrun, a process that is not rank 0 never gets one: it serves rank 0 instead, and ends
    with it (SystemExit).
    """

    def __init__(self, config: EngineConfig) -> None:
        """Raises UnsupportedModelError or ValueError before any weight is read, RankError for a
        rank that does not come or is of another version or model."""
        from flexinfer.models.loading import choose_scheme_of_parts
        from flexinfer.models.model_config import resolve_config
        from flexinfer.models.sharding import check_plan

        num_ranks = config.tensor_parallel_size
        check_plan(resolve_config(config.model, config.overrides), num_ranks)
        choose_scheme_of_parts(config)
        _check_device(str(config.device))
        if is_launched() and launched_rank(num_ranks) > 0:
            from flexinfer.distributed.rank import serve_rank

            serve_rank(config)
            raise SystemExit(0)
        self._config = config
        self._ranks = start_ranks(config, choose_threads_of_rank(config.threads, num_ranks))

    @property
    def sent_bytes(self) -> int:
        """Of all steps so far; each is sent to every rank."""
        return self._ranks.sent_bytes

    @property
    def send_s(self) -> float:
        """Seconds that sending these took."""
        return self._ranks.send_s

    @property
    def weight_bytes(self) -> dict[int, int]:
        """Of each rank."""
        return self._ranks.weight_bytes

    def load(self) -> LoadedModel:
        """This rank's part of the model; returns when all have theirs."""
        from flexinfer.distributed.rank import rank_device
        from flexinfer.layers.exchanges import CollectiveError
        from flexinfer.models.describe import describe
        from flexinfer.models.loading import load_part_of_model
        from flexinfer.models.sharding import RankOf

        config = self._config
        device = rank_device(str(config.device), 0)
        start_s = time.perf_counter()
        part = RankOf(0, config.tensor_parallel_size)
        model, num_bytes = load_part_of_model(config, device, part)
        self._ranks.note_loaded(0, Loaded(num_bytes, time.perf_counter() - start_s))
        self._ranks.wait_done(LOAD_TIMEOUT_S)
        self._ranks.send(Probe())
        try:
            loaded = describe(model, str(config.model))
        except CollectiveError as error:
            raise self._ranks.explain(error) from error
        return loaded

    def open(
        self, runner: ModelRunner, manager: VTensorManager, memory: KVMemory, max_seq_len: int
    ) -> TensorParallelExecutor:
        """What computes on all ranks. REQUIRES: nothing has been done with the manager."""
        from flexinfer.distributed.executor import TensorParallelExecutor
        from flexinfer.layers.exchanges import CollectiveError

        self._ranks.send(OpenManager(memory.budget_bytes, max_seq_len, runner.inputs.pads_rows))
        try:
            runner.compile_ahead()
        except CollectiveError as error:
            raise self._ranks.explain(error) from error
        bound_waiting(self._config.distributed_timeout_s)
        self._ranks.wait_done(LOAD_TIMEOUT_S)
        return TensorParallelExecutor(
            runner,
            record_operations(manager),
            self._ranks,
            timeout_s=self._config.distributed_timeout_s,
            check_interval=self._config.distributed_check_interval,
        )

    def check(self) -> None:
        """Raises RankError if a rank has failed."""
        self._ranks.check()

    def when_failed(self, wake: Callable[[], None]) -> None:
        """Have `wake` called, in another thread, as soon as a rank has failed."""
        self._ranks.on_failure = wake

    def close(self) -> None:
        """End all ranks. May be called again."""
        self._ranks.close()
        leave_group()


def _check_device(device: str) -> None:
    """transformers places a plan on the accelerator that torch sees."""
    import torch

    if device.startswith("cpu") and torch.cuda.is_available():
        raise ValueError(
            "tensor_parallel_size > 1 on the CPUs of a machine with GPUs: hide these with "
            "CUDA_VISIBLE_DEVICES="
        )
    if ":" in device:
        raise ValueError(
            f"device is {device!r}, but each rank takes a GPU of its own: say 'cuda', and choose "
            "among them with CUDA_VISIBLE_DEVICES"
        )
