"""The draft model of an engine: checked before any weight is read, then loaded beside it."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flexinfer.errors import UnsupportedModelError
from flexinfer.memory.budget import KVMemory
from flexinfer.memory.kv_groups import kv_spec
from flexinfer.memory.kv_setup import make_manager

if TYPE_CHECKING:
    from flexinfer.config import EngineConfig
    from flexinfer.engine.draft_model import DraftModel
    from flexinfer.models.describe import LoadedModel

logger = logging.getLogger(__name__)


def check_draft(config: EngineConfig, tokenizer: Any | None) -> None:
    """Whether the two models speak of the same tokens. Reads no weights; raises ValueError or
    UnsupportedModelError."""
    from flexinfer.models.model_config import resolve_config

    speculation = config.speculation
    if speculation is None or speculation.model is None:
        return
    device = config.device or getattr(config.model, "device", "cpu")
    if str(device).startswith("cuda"):
        raise ValueError(
            'speculative_config: method "draft_model" is for the CPU; on a GPU there is "ngram"'
        )
    sizes = [
        resolve_config(model).get_text_config().vocab_size
        for model in (config.model, speculation.model)
    ]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the draft model {_name(speculation.model)} has a vocabulary of {sizes[1]} tokens, "
            f"the model one of {sizes[0]}: what it proposes would mean something else"
        )
    if tokenizer is not None and isinstance(speculation.model, (str, os.PathLike)):
        _check_tokenizer(speculation.model, tokenizer)


def _check_tokenizer(model: str | os.PathLike[str], tokenizer: Any) -> None:
    """A folder without one, as of weights alone, is taken at its vocabulary's size: what it
    proposes is verified whatever it means."""
    from flexinfer.engine.inputs import load_tokenizer

    try:
        own = load_tokenizer(None, model)
    except UnsupportedModelError:
        logger.warning(
            "the draft model %s has no tokenizer that can be loaded: its tokens are taken to be "
            "the model's",
            _name(model),
        )
        return
    if own.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"the draft model {_name(model)} has another tokenizer than the model: "
            "what it proposes would mean something else"
        )


def load_draft(config: EngineConfig) -> LoadedModel | None:
    """None where `speculative_config` names no model."""
    from flexinfer.models.loading import load_model

    speculation = config.speculation
    if speculation is None or speculation.model is None:
        return None
    draft = load_model(speculation.model, config.dtype, config.device)
    if draft.state:
        raise ValueError(
            f"the draft model {_name(speculation.model)} keeps a recurrent state, which cannot go "
            "back to before a token that was rejected"
        )
    return draft


def share_of_draft(loaded: LoadedModel, draft: LoadedModel, kv_cache_dtype: str) -> float:
    """Of the KV memory, the part of the draft model, whose KV is never quantised: both hold as many
    tokens."""
    own = kv_spec(draft, 1, None).bytes_per_token
    return own / (own + kv_spec(loaded, 1, None, kv_cache_dtype).bytes_per_token)


def split_budget(memory: KVMemory, share: float) -> tuple[KVMemory, KVMemory]:
    """What is left of the engine's KV memory, and the draft model's part."""
    drafts = int(memory.budget_bytes * share)
    reason = f"{share:.1%} of the KV memory, for as many tokens of the draft model"
    return replace(memory, budget_bytes=memory.budget_bytes - drafts), KVMemory(drafts, reason)


def make_draft_model(
    config: EngineConfig, draft: LoadedModel, max_model_len: int, memory: KVMemory, share: float
) -> DraftModel:
    """With a manager of its own. Raises ValueError if the memory is too little."""
    from flexinfer.engine.draft_model import DraftModel
    from flexinfer.models.checks import max_positions
    from flexinfer.runner.model_runner import ModelRunner
    from flexinfer.sampling.grammars import GrammarCompiler

    limit = max_positions(draft.model.config)
    max_len = max_model_len if limit is None else min(limit, max_model_len)
    settings = replace(
        config,
        swap_space=0,
        preemption_mode="recompute",
        prefix_cache_memory=None,
        kv_cache_dtype="auto",
        layers_per_plane=None,  # of the model's layers, not of these
    )
    try:
        manager = make_manager(settings, draft, max_len, memory)
    except ValueError as error:
        name = _name(config.speculation and config.speculation.model)
        raise ValueError(
            f"the draft model {name}, which has {share:.1%} of the KV memory: {error}"
        ) from error
    try:
        unused = GrammarCompiler(None, draft.vocab_size, draft.eos_token_ids)
        runner = ModelRunner(draft, manager, config.attention_backend, config.seed, unused)
        max_step_tokens = config.scheduler_config(max_model_len).max_num_batched_tokens
        return DraftModel(
            manager,
            runner,
            max_len,
            max_step_tokens,
            share,
            caches_prefixes=config.enable_prefix_caching,
        )
    except BaseException:
        manager.close()
        raise


def _name(model: Any) -> str:
    return repr(os.fspath(model)) if isinstance(model, (str, os.PathLike)) else type(model).__name__
