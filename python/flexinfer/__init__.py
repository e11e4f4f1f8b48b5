"""FlexInfer: LLM serving on a KV cache made of virtual memory.

Importing this package is cheap: no torch and no extension module is loaded before a name is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexinfer.async_llm import AsyncLLM, AsyncLLMEngine
    from flexinfer.conversation import Conversation
    from flexinfer.engine.llm_engine import LLMEngine
    from flexinfer.engine_args import AsyncEngineArgs, EngineArgs
    from flexinfer.errors import (
        DriverError,
        EngineDeadError,
        EngineError,
        IntegrityError,
        MappingLimitError,
        OutOfMemoryError,
        RankError,
        ReleasedError,
        RequestError,
        UnsupportedModelError,
        VTensorError,
    )
    from flexinfer.llm import LLM
    from flexinfer.lora.request import LoRARequest
    from flexinfer.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        Logprob,
        RequestMetrics,
        RequestOutput,
    )
    from flexinfer.sampling.params import BeamSearchParams, RequestOutputKind, SamplingParams
    from flexinfer.types import TextPrompt, TokensPrompt
    from flexinfer.vtensor import KVSpec, VTensor, VTensorManager

__version__ = "0.1.0"

_HOME_OF = {
    "LLM": "llm",
    "LLMEngine": "engine.llm_engine",
    "EngineArgs": "engine_args",
    "AsyncEngineArgs": "engine_args",
    "LoRARequest": "lora.request",
    "AsyncLLM": "async_llm",
    "AsyncLLMEngine": "async_llm",
    "Conversation": "conversation",
    "SamplingParams": "sampling.params",
    "BeamSearchParams": "sampling.params",
    "RequestOutputKind": "sampling.params",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
    "BeamSearchOutput": "outputs",
    "BeamSearchSequence": "outputs",
    "Logprob": "outputs",
    "RequestMetrics": "outputs",
    "TextPrompt": "types",
    "TokensPrompt": "types",
    "KVSpec": "vtensor",
    "VTensor": "vtensor",
    "VTensorManager": "vtensor",
    "VTensorError": "errors",
    "OutOfMemoryError": "errors",
    "DriverError": "errors",
    "MappingLimitError": "errors",
    "ReleasedError": "errors",
    "IntegrityError": "errors",
    "UnsupportedModelError": "errors",
    "RequestError": "errors",
    "EngineError": "errors",
    "RankError": "errors",
    "EngineDeadError": "errors",
}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "Conversation",
    "DriverError",
    "EngineArgs",
    "EngineDeadError",
    "EngineError",
    "IntegrityError",
    "KVSpec",
    "LLMEngine",
    "LoRARequest",
    "Logprob",
    "MappingLimitError",
    "OutOfMemoryError",
    "RankError",
    "ReleasedError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
    "UnsupportedModelError",
    "VTensor",
    "VTensorError",
    "VTensorManager",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import the module that defines `name` at its first use (PEP 562)."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
