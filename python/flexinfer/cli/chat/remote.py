"""RemoteBackend: `flexinfer chat --url`, with any server that speaks OpenAI's interface."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from flexinfer.cli.chat.backend import AnswerNumbers, BackendError
from flexinfer.cli.endpoint import ADMIN_KEY, Endpoint, EndpointError, memory_path

if TYPE_CHECKING:
    from rich.console import RenderableType

    from flexinfer.cli.chat.sampling import ChatSampling
    from flexinfer.types import ChatMessage


class RemoteSession:
    """The messages of one conversation; each turn sends them all, as OpenAI's interface wants."""

    def __init__(
        self, endpoint: Endpoint, model: str, messages: Sequence[ChatMessage] = ()
    ) -> None:
        self._endpoint = endpoint
        self._model = model
        self.messages: list[ChatMessage] = list(messages)
        self.numbers = AnswerNumbers()

    def say(self, text: str, sampling: ChatSampling) -> Generator[str, None, None]:
        self.numbers = AnswerNumbers(finish_reason="abort")
        asked: list[ChatMessage] = [*self.messages, {"role": "user", "content": text}]
        body = {"model": self._model, "messages": asked, **request_options(sampling)}
        said: list[str] = []
        start_s = time.monotonic()
        try:
            with closing(self._endpoint.post_stream("/v1/chat/completions", body)) as events:
                for event in events:
                    piece = self._note(event, start_s)
                    if piece:
                        said.append(piece)
                        yield piece
        except EndpointError as error:
            raise BackendError(str(error)) from error
        except GeneratorExit:
            if said:
                self._keep(asked, said)
            raise
        self._keep(asked, said)

    def take_back(self) -> str | None:
        users = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if not users:
            return None
        text = str(self.messages[users[-1]]["content"])
        del self.messages[users[-1] :]
        return text

    def fork(self) -> RemoteSession:
        return RemoteSession(self._endpoint, self._model, self.messages)

    def close(self) -> None:
        """Nothing is held at the server."""

    def _keep(self, asked: list[ChatMessage], said: list[str]) -> None:
        self.messages = [*asked, {"role": "assistant", "content": "".join(said)}]

    def _note(self, event: dict[str, Any], start_s: float) -> str:
        """What an event adds to the answer; its numbers are kept."""
        numbers, now = self.numbers, time.monotonic()
        piece = ""
        for choice in event.get("choices") or ():
            piece += choice.get("delta", {}).get("content") or ""
            numbers.finish_reason = choice.get("finish_reason") or numbers.finish_reason
        if piece:
            numbers.num_tokens += 1
            if numbers.first_token_s is None:
                numbers.first_token_s = now - start_s
            numbers.decode_s = now - start_s - numbers.first_token_s
        if usage := event.get("usage"):
            numbers.num_prompt_tokens = usage.get("prompt_tokens")
            numbers.num_tokens = usage.get("completion_tokens", numbers.num_tokens)
            details = usage.get("prompt_tokens_details") or {}
            numbers.num_cached_tokens = details.get("cached_tokens")
        return piece


class RemoteBackend:
    """A server. FlexInfer's own also shows its memory, to those who may see it."""

    def __init__(
        self, url: str, model: str | None, api_key: str | None, admin_key: str | None
    ) -> None:
        """Raises ValueError if there is no answer at `url`."""
        self._endpoint = Endpoint(url, api_key, timeout_s=600.0)
        self._admin = Endpoint(url, admin_key, source=ADMIN_KEY)
        self._model = model or self._endpoint.first_model()

    def greeting(self) -> list[str]:
        return [f"{self._model} at {self._endpoint.url}."]

    def session(self, system: str) -> RemoteSession:
        from flexinfer.engine.history import system_message

        return RemoteSession(self._endpoint, self._model, system_message(system))

    def memory(self, width: int) -> list[RenderableType]:
        from flexinfer.cli.inspect.command import report_parts
        from flexinfer.cli.inspect.report import MemoryReport

        report = MemoryReport.from_json(self._memory())
        return list(report_parts(report, width, with_map=True))

    def stats(self) -> list[str]:
        stats = self._memory()["stats"]
        return [f"{name:22} {value}" for name, value in stats.items() if name != "driver_calls"]

    def close(self) -> None:
        self._endpoint.close()
        self._admin.close()

    def _memory(self) -> dict[str, Any]:
        try:
            path = memory_path(self._endpoint.replica)
            memory: dict[str, Any] = self._admin.get_json(path)
        except EndpointError as error:
            raise BackendError(f"the server shows no memory map: {error}") from error
        return memory


def request_options(sampling: ChatSampling) -> dict[str, Any]:
    """Options of a streamed request. What nobody has said is left to the server, which may know
    what its model's makers advise."""
    return {"stream": True, "stream_options": {"include_usage": True}, **sampling.given}
