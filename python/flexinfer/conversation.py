"""Conversation: a dialogue whose KV stays in memory from turn to turn, and that can be forked.

After each turn its tokens are recorded in the radix tree and pinned there, in this conversation's
name: a pinned prefix holds chunks but no slot, and is never evicted. A turn aliases them and
computes only what is new. A fork is a second pin, nothing is copied; where branches part, each
writes behind the shared whole chunks, and copies at most the tail row (PagedAttention, section
4.4, with chunks instead of blocks). Not thread-safe, like the LLM it belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any

from flexinfer.errors import EngineError, ReleasedError, RequestError
from flexinfer.outputs import RequestOutput
from flexinfer.sampling_params import SamplingParams
from flexinfer.types import ChatMessage, Messages, TokensPrompt

if TYPE_CHECKING:
    from flexinfer.llm import LLM

_pin_ids = count()


class Conversation:
    """
    with llm.conversation([{"role": "system", "content": "Be brief."}]) as chat:
        print(chat.say("Hello").outputs[0].text)
        with chat.fork() as other:
            print(other.say("Why?").outputs[0].text)

    Invariant: the KV of `token_ids`, as far as it was computed, is pinned until `close`.
    """

    def __init__(
        self, llm: LLM, history: Messages | Sequence[int] = (), cache_salt: str = ""
    ) -> None:
        """`history`: messages of a chat, or token ids. Nothing is computed yet."""
        self._pin: str | None = None
        self._closed = False
        self._llm = llm
        self._cache_salt = cache_salt
        if not llm.llm_engine.config.enable_prefix_caching:
            raise RequestError("a conversation needs enable_prefix_caching: it keeps its prefix")
        given: Any = history
        if isinstance(given, str):
            raise RequestError(f"a conversation starts from messages or tokens, got {given!r}")
        items: list[Any] = list(given)
        is_chat = bool(items) and isinstance(items[0], dict)
        self.messages: list[ChatMessage] = items if is_chat else []
        """What was said, by turns; empty if the conversation goes by tokens."""
        self.token_ids: list[int] = [] if is_chat else items
        """What the model has seen and said."""

    def say(self, content: str, sampling_params: SamplingParams | None = None) -> RequestOutput:
        """The user's next message, and the assistant's answer to it."""
        self._check_open()
        if self.token_ids and not self.messages:
            raise RequestError("this conversation goes by token ids: use append and generate")
        messages: list[ChatMessage] = [*self.messages, {"role": "user", "content": content}]
        prompt = self._llm.llm_engine.inputs.apply_chat_template(
            messages, add_generation_prompt=True
        )
        output = self._complete(prompt, sampling_params)
        self.messages = [*messages, {"role": "assistant", "content": output.outputs[0].text}]
        return output

    def append(self, token_ids: Sequence[int]) -> None:
        """Tokens that come next; they are computed with the next `generate`."""
        self._check_open()
        if self.messages:
            raise RequestError("this conversation goes by messages: use say")
        self.token_ids = [*self.token_ids, *token_ids]

    def generate(self, sampling_params: SamplingParams | None = None) -> RequestOutput:
        """Go on from the tokens so far; what is generated becomes part of them."""
        self._check_open()
        if self.messages:
            raise RequestError("this conversation goes by messages: use say")
        return self._complete(self.token_ids, sampling_params)

    def fork(self) -> Conversation:
        """A second conversation with the same past. Costs no memory and no time."""
        self._check_open()
        fork = Conversation(self._llm, (), self._cache_salt)
        fork.messages, fork.token_ids = list(self.messages), list(self.token_ids)
        fork._keep()
        return fork

    def close(self) -> None:
        """Let the KV be evicted. May be called again. Raises ValueError while the engine sleeps."""
        self._unpin()
        self._closed = True

    def __enter__(self) -> Conversation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()

    def _complete(self, prompt: list[int], params: SamplingParams | None) -> RequestOutput:
        """The conversation is as before if this raises, or ends with an error."""
        if params is not None and params.num_samples != 1:
            raise RequestError(
                f"a conversation goes on with one answer, got n={params.n}: fork it instead"
            )
        tokens: TokensPrompt = {"prompt_token_ids": prompt, "cache_salt": self._cache_salt}
        (output,) = self._llm.generate([tokens], params, use_tqdm=False)
        answer = output.outputs[0]
        if answer.finish_reason in ("abort", "error"):
            raise EngineError(f"the turn ended with {answer.finish_reason}: {answer.stop_reason}")
        self.token_ids = [*prompt, *answer.token_ids]
        self._keep()
        return output

    def _keep(self) -> None:
        """Pin what is recorded of the tokens, then let the pin of the turn before go."""
        pin = f"conversation {next(_pin_ids)}"
        manager = self._llm.llm_engine.manager
        manager.pin_prefix(self.token_ids, pin, cache_salt=self._cache_salt)
        self._unpin()
        self._pin = pin

    def _unpin(self) -> None:
        manager = self._llm.llm_engine.manager
        if self._pin is not None and not manager.closed:
            manager.unpin_prefix(self._pin)
        self._pin = None

    def _check_open(self) -> None:
        if self._closed:
            raise ReleasedError("the conversation is closed")
