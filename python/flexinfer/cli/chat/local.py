"""LocalBackend: `flexinfer chat` with an engine in this process."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from flexinfer.cli.chat.backend import AnswerNumbers, BackendError
from flexinfer.cli.chat.harmony_text import HarmonyText
from flexinfer.cli.memory_map import recorded_rows, render_map
from flexinfer.cli.settings import EngineSettings
from flexinfer.cli.terminal_text import size_text
from flexinfer.errors import EngineError, RequestError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from flexinfer.cli.chat.sampling import ChatSampling
    from flexinfer.conversation import Conversation
    from flexinfer.outputs import RequestOutput
    from flexinfer.types import ChatMessage


class LocalSession:
    """A `Conversation` at the terminal."""

    def __init__(self, conversation: Conversation, *, writes_harmony: bool = False) -> None:
        """`writes_harmony`: the model answers in gpt-oss' form, whose marks are not to be seen."""
        self._conversation = conversation
        self._writes_harmony = writes_harmony
        self.numbers = AnswerNumbers()

    @property
    def messages(self) -> Sequence[ChatMessage]:
        return self._conversation.messages

    def say(self, text: str, sampling: ChatSampling) -> Generator[str, None, None]:
        from jinja2 import TemplateError

        self.numbers = AnswerNumbers(finish_reason="abort")
        params = sampling.params()
        harmony = HarmonyText() if self._writes_harmony else None
        if harmony is not None:
            params = replace(params, skip_special_tokens=False)
        try:
            with closing(self._conversation.stream(text, params)) as outputs:
                for output in outputs:
                    self._note(output)
                    said = "".join(part.text for part in output.outputs)
                    yield harmony.read(said, is_last=output.finished) if harmony else said
        except (RequestError, EngineError) as error:
            raise BackendError(str(error)) from error
        except TemplateError as error:  # one by the template itself, or of its syntax
            why = " ".join(str(error).split())
            raise BackendError(
                f"the model's chat template refuses these messages: {why}"
            ) from error

    def take_back(self) -> str | None:
        return self._conversation.take_back()

    def fork(self) -> LocalSession:
        return LocalSession(self._conversation.fork(), writes_harmony=self._writes_harmony)

    def close(self) -> None:
        self._conversation.close()

    def _note(self, output: RequestOutput) -> None:
        numbers, metrics = self.numbers, output.metrics
        numbers.num_prompt_tokens = len(output.prompt_token_ids)
        numbers.num_cached_tokens = output.num_cached_tokens or 0
        numbers.num_tokens += sum(len(part.token_ids) for part in output.outputs)
        numbers.chunks_aliased, numbers.chunks_copied = (
            metrics.chunks_aliased,
            metrics.chunks_copied,
        )
        numbers.first_token_s = metrics.time_to_first_token_s
        if metrics.first_token_time is not None:
            numbers.decode_s = time.monotonic() - metrics.first_token_time
        if output.finished:
            numbers.finish_reason = output.outputs[0].finish_reason


class LocalBackend:
    """A model with its KV cache, opened for one person."""

    def __init__(self, engine: EngineSettings) -> None:
        """Loads the model. Raises ValueError or OSError for what cannot work."""
        self._llm = engine.open()

    @property
    def defaults(self) -> dict[str, float]:
        """How answers are drawn where nobody says it: greedily, unless the model's makers do."""
        return {"temperature": 0.0, **self._llm.llm_engine.sampling_defaults.values}

    def greeting(self) -> list[str]:
        engine = self._llm.engine
        lines = [f"{engine.loaded.name}, {engine.max_model_len} tokens.", f"{engine.kv_memory}."]
        with self._llm.conversation() as probe:
            if not probe.has_template:
                lines.append("The model has no chat template: it continues plain 'User: ...' text.")
        return lines

    def session(self, system: str) -> LocalSession:
        from flexinfer.engine.history import HarmonyFormat, choose_format, system_message

        text_format = choose_format(self._llm.get_tokenizer())
        return LocalSession(
            self._llm.conversation(system_message(system)),
            writes_harmony=isinstance(text_format, HarmonyFormat),
        )

    def memory(self, width: int) -> list[RenderableType]:
        manager = self._llm.engine.manager
        snapshot = manager.snapshot()
        stats = manager.stats()
        rows = recorded_rows(snapshot)
        numbers = (
            f"{stats.recorded_tokens} tokens recorded in {size_text(stats.recorded_bytes)}; "
            f"{size_text(stats.resident_bytes)} resident, budget {size_text(stats.budget_bytes)}; "
            f"each letter is a chunk of {size_text(manager.chunk_bytes)}"
            + (f", first of {snapshot.num_planes} planes" if snapshot.num_planes > 1 else "")
        )
        return [*([render_map(rows, width)] if rows else []), numbers]

    def stats(self) -> list[str]:
        lines = []
        for name, value in self._llm.engine.manager.stats().as_dict().items():
            if name.endswith("_bytes"):
                lines.append(f"{name:22} {size_text(value)}")
            elif isinstance(value, dict):
                calls = {kind: entry["calls"] for kind, entry in value.items() if entry["calls"]}
                lines.append(f"{name:22} {', '.join(f'{k} {n}' for k, n in calls.items())}")
            else:
                lines.append(f"{name:22} {value:.0f}")
        return lines

    def close(self) -> None:
        self._llm.close()
