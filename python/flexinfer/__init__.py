"""FlexInfer: LLM serving on a KV cache made of virtual memory.

Importing this package is cheap: no torch and no extension module is loaded before a name is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexinfer.engine import LLMEngine
    from flexinfer.errors import (
        DriverError,
        IntegrityError,
        MappingLimitError,
        OutOfMemoryError,
        ReleasedError,
        RequestError,
        UnsupportedModelError,
        VTensorError,
    )
    from flexinfer.llm import LLM
    from flexinfer.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from flexinfer.sampling_params import RequestOutputKind, SamplingParams
    from flexinfer.types import TextPrompt, TokensPrompt
    from flexinfer.vtensor import KVSpec, VTensor, VTensorManager

__version__ = "0.1.0"

_HOME_OF = {
    "LLM": "llm",
    "LLMEngine": "engine",
    "SamplingParams": "sampling_params",
    "RequestOutputKind": "sampling_params",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
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
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "DriverError",
    "IntegrityError",
    "KVSpec",
    "LLMEngine",
    "Logprob",
    "MappingLimitError",
    "OutOfMemoryError",
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
