"""EngineArgs, AsyncEngineArgs: EngineConfig under vLLM's names, from vLLM's arguments."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from flexinfer.config import EngineConfig
from flexinfer.runtime.vllm_arguments import note_remote_code, translate


class EngineArgs(EngineConfig):
    """What `LLM` and `AsyncLLM` take, for `from_engine_args` of LLMEngine and AsyncLLM.

    Frozen, as EngineConfig is: `dataclasses.replace` makes another one.
    """

    def __init__(self, model: Any, *, trust_remote_code: bool = False, **settings: Any) -> None:
        """`settings` are the fields of `EngineConfig`, or other arguments of vLLM's that ask for
        nothing else (runtime/vllm_names.py). Raises ValueError or TypeError, by the name."""
        note_remote_code(trust_remote_code)
        known = [field.name for field in fields(EngineConfig)]
        super().__init__(model=model, **translate(settings, known))


AsyncEngineArgs = EngineArgs
