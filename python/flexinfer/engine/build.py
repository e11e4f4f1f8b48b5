"""From settings to the parts of an engine: the model is loaded, its KV memory is opened."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from flexinfer.config import EngineConfig
from flexinfer.distributed.tensor_parallel import TensorParallelRanks, rank_threads
from flexinfer.engine.build_draft import (
    check_draft,
    load_draft,
    make_draft_model,
    share_of_draft,
    split_budget,
)
from flexinfer.engine.generation_config import sampling_defaults
from flexinfer.engine.inputs import InputProcessor, load_tokenizer
from flexinfer.errors import UnsupportedModelError
from flexinfer.handover.roles import check_device
from flexinfer.lora.adapters import Adapters
from flexinfer.memory.elastic import ElasticMemory
from flexinfer.memory.epochs import kernel_epoch
from flexinfer.memory.kv_groups import check_kv_dtype
from flexinfer.memory.kv_setup import (
    check_kv_sizes,
    choose_max_model_len,
    derive_kv_memory,
    fit_max_model_len,
    make_manager,
)
from flexinfer.runtime.device import choose_device
from flexinfer.runtime.process import check_process
from flexinfer.runtime.torch_modes import plain_modes
from flexinfer.sampling.defaults import SamplingDefaults
from flexinfer.sampling.grammars import GrammarCompiler
from flexinfer.scheduler.scheduler import Scheduler
from flexinfer.speculation.drafter import NgramDrafter
from flexinfer.speculation.speculation import Speculation

if TYPE_CHECKING:
    from flexinfer.engine.draft_model import DraftModel
    from flexinfer.events.publisher import EventPublisher
    from flexinfer.memory.budget import KVMemory
    from flexinfer.memory.torch_share import TorchMemory
    from flexinfer.models.describe import LoadedModel
    from flexinfer.runner.executor import Executor
    from flexinfer.runner.model_runner import ModelRunner
    from flexinfer.vtensor import VTensorManager


@dataclass(frozen=True, slots=True)
class EngineParts:
    """All that an engine owns."""

    config: EngineConfig
    """With the device that was chosen."""
    tokenizer: Any | None
    loaded: LoadedModel
    kv_memory: KVMemory
    manager: VTensorManager
    scheduler: Scheduler
    runner: ModelRunner
    inputs: InputProcessor
    grammars: GrammarCompiler
    epoch: AbstractContextManager[object | None]
    """Entered around the launch of a step's kernels."""
    torch_memory: TorchMemory
    elastic: ElasticMemory
    executor: Executor
    """The runner, or what has all ranks compute."""
    ranks: TensorParallelRanks | None
    """The other processes of this engine."""
    draft_model: DraftModel | None = None
    """What proposes tokens, where `speculative_config` names one."""
    events: EventPublisher | None = None
    """What tells others which prefixes are recorded."""
    adapters: Adapters = field(default_factory=Adapters)
    """The LoRA adapters; none may be loaded unless `enable_lora` is set."""
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    """What a request has for what it leaves out."""


@plain_modes()
def build_parts(config: EngineConfig) -> EngineParts:
    """Raises ValueError or UnsupportedModelError for settings or models that cannot work.

    What can be refused without the weights is refused before they are read.
    """
    from flexinfer.models.hub import asking_if_it_answers, at_revision
    from flexinfer.runtime.torch_settings import set_up_torch

    check_process(rank_threads(config))
    set_up_torch(rank_threads(config))
    config = _check(config)
    draft = None if config.speculation is None else config.speculation.model
    with asking_if_it_answers((config.model, config.tokenizer, draft)):
        return _build(at_revision(config))


def _build(config: EngineConfig) -> EngineParts:
    from flexinfer.models.checks import check_calls_compilable, check_compilable, max_positions
    from flexinfer.models.eager_experts import check_experts_compilable
    from flexinfer.models.loading import check_format, load_model
    from flexinfer.models.model_config import resolve_config

    check_format(config.model, config.load_format)
    model_config = resolve_config(config.model, config.overrides)
    if config.compile:
        check_compilable(model_config)
    wanted_len = choose_max_model_len(config, max_positions(model_config))
    defaults = sampling_defaults(config)
    tokenizer = None
    if not config.skip_tokenizer_init:
        tokenizer = load_tokenizer(config.tokenizer, config.model)
    check_draft(config, tokenizer)
    check_kv_dtype(config, model_config)
    ranks: TensorParallelRanks | None = None
    if config.tensor_parallel_size > 1:
        ranks = TensorParallelRanks(config)
    events: EventPublisher | None = None
    try:
        events = _event_publisher(config)
        if ranks is None:
            loaded = load_model(
                config.model,
                config.dtype,
                config.device,
                config.quantization or "auto",
                config.load_format,
                config.overrides,
            )
        else:
            loaded = ranks.load()
        if config.compile:
            check_calls_compilable(loaded.name, counts_calls=loaded.counts_calls)
            check_experts_compilable(loaded.model)
        parts = _open(config, tokenizer, loaded, wanted_len, ranks)
        if events is not None:
            events.start(parts.manager)
        if config.enable_lora:
            parts = replace(parts, adapters=Adapters(loaded, config.max_lora_rank))
        return replace(parts, events=events, sampling_defaults=defaults)
    except BaseException:
        if events is not None:
            events.close()
        if ranks is not None:
            ranks.close()
        raise


def _event_publisher(config: EngineConfig) -> EventPublisher | None:
    """Listening, where events are asked for."""
    if config.kv_events is None:
        return None
    from flexinfer.events.publisher import EventPublisher

    return EventPublisher(config.kv_events)


def _open(
    config: EngineConfig,
    tokenizer: Any | None,
    loaded: LoadedModel,
    wanted_len: int,
    ranks: TensorParallelRanks | None,
) -> EngineParts:
    """The KV memory, and all parts around it."""
    if config.async_scheduling is None:
        is_alone = config.speculation is None and ranks is None and not loaded.state
        config = replace(config, async_scheduling=loaded.device.type == "cuda" and is_alone)
    check_device(config.role, str(loaded.device))
    _check_state(config, loaded)
    draft = load_draft(config)
    kv_memory = derive_kv_memory(config, loaded, wanted_len)
    draft_share = 0.0 if draft is None else share_of_draft(loaded, draft, config.kv_cache_dtype)
    kv_memory, draft_memory = split_budget(kv_memory, draft_share)
    manager = make_manager(config, loaded, wanted_len, kv_memory)
    try:
        if config.trace is not None:
            manager.start_trace(config.trace)
        parts = _assemble(config, tokenizer, loaded, kv_memory, manager, wanted_len, ranks)
        if draft is not None:
            max_len = parts.scheduler.config.max_model_len
            model = make_draft_model(config, draft, max_len, draft_memory, draft_share)
            parts = replace(parts, draft_model=model)
        has_graphs = not config.enforce_eager and ranks is None and not loaded.state
        if loaded.device.type == "cuda" and has_graphs:
            _capture_graphs(parts)
    except BaseException:
        manager.close()
        raise
    manager.pre_extend([], [])  # the worker creates the first chunks before the first request
    return parts


def make_speculation(parts: EngineParts) -> Speculation | None:
    """None: the config asks for none."""
    settings = parts.config.speculation
    if settings is None:
        return None
    return Speculation(
        settings.num_speculative_tokens,
        parts.draft_model or NgramDrafter(*settings.lookup_lengths),
        parts.manager,
        parts.scheduler.config.max_num_batched_tokens,
    )


def _check(config: EngineConfig) -> EngineConfig:
    from flexinfer import attention
    from flexinfer.runtime.torch_settings import check_can_compile

    attention.check_name(config.attention_backend)
    is_loaded = not isinstance(config.model, (str, os.PathLike))
    config = replace(config, device=choose_device(config.device, is_loaded=is_loaded))
    check_device(config.role, config.device)
    if config.compile:
        check_can_compile(str(config.device).partition(":")[0])
    check_kv_sizes(config)
    return config


def _check_state(config: EngineConfig, loaded: LoadedModel) -> None:
    """Refuse what does not go with a recurrent state. Raises UnsupportedModelError."""
    if not loaded.state:
        return
    if config.tensor_parallel_size > 1:
        raise UnsupportedModelError(
            f"tensor_parallel_size > 1 does not go with {type(loaded.model).__name__}, which keeps "
            "a recurrent state: nothing splits it over ranks"
        )
    if config.kv_cache_dtype != "auto":
        raise UnsupportedModelError(
            f"kv_cache_dtype={config.kv_cache_dtype!r} does not go with "
            f"{type(loaded.model).__name__}, which keeps a recurrent state: it would be laid out "
            "among bytes"
        )
    for name, reason in (
        ("speculative_config", "the state cannot go back to before a token that was rejected"),
        ("async_scheduling", "a step would read the state that the one before it still writes"),
        ("compile", "the layers that keep it are called part by part"),
        ("enable_lora", "the layers that keep it are called part by part"),
    ):
        if getattr(config, name):
            raise UnsupportedModelError(
                f"{name} does not go with {type(loaded.model).__name__}, which keeps a recurrent "
                f"state: {reason}"
            )


def _assemble(
    config: EngineConfig,
    tokenizer: Any | None,
    loaded: LoadedModel,
    kv_memory: KVMemory,
    manager: VTensorManager,
    wanted_len: int,
    ranks: TensorParallelRanks | None,
) -> EngineParts:
    from flexinfer.memory.torch_share import share_device
    from flexinfer.runner.model_runner import ModelRunner

    max_model_len = fit_max_model_len(manager, wanted_len, config)
    scheduler = Scheduler(config.scheduler_config(max_model_len), manager)
    grammars = GrammarCompiler(tokenizer, loaded.vocab_size, loaded.eos_token_ids)
    runner = ModelRunner(
        loaded,
        manager,
        config.attention_backend,
        config.seed,
        grammars,
        compile_model=config.compile,
        kv_cache_dtype=config.kv_cache_dtype,
    )
    return EngineParts(
        config=config,
        tokenizer=tokenizer,
        loaded=loaded,
        kv_memory=kv_memory,
        manager=manager,
        scheduler=scheduler,
        runner=runner,
        inputs=InputProcessor(tokenizer, loaded.vocab_size, max_model_len),
        grammars=grammars,
        epoch=kernel_epoch(manager, loaded.device) if ranks is None else nullcontext(),
        torch_memory=share_device(manager, loaded.device),
        elastic=ElasticMemory(scheduler, manager, config.swap_directory),
        executor=runner if ranks is None else ranks.open(runner, manager, kv_memory, wanted_len),
        ranks=ranks,
    )


def _capture_graphs(parts: EngineParts) -> None:
    """Record decode steps as CUDA graphs, with a vTensor that lives only meanwhile."""
    from flexinfer.runner.cuda_graphs import CudaRecorder, choose_sizes

    sizes = choose_sizes(parts.config.cuda_graph_sizes, parts.scheduler.config.max_num_seqs)
    vtensor = parts.manager.create()
    try:
        with parts.epoch:
            parts.runner.capture_graphs(vtensor, CudaRecorder(parts.loaded.device), sizes)
    finally:
        vtensor.release()
