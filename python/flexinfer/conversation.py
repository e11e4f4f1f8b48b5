"""Conversation: a dialogue whose KV stays in memory from turn to turn, and that can be forked.

After each turn its tokens are recorded in the radix tree and pinned there, in this conversation's
name: a pinned prefix holds chunks but no slot, and is never evicted. A turn aliases them and
computes only what is new. A fork is a second pin, nothing is copied; where branches part, each
writes behind the shared whole chunks, and copies at most the tail row (PagedAttention, section
4.4, with chunks instead of blocks). Prompts extend the tokens of the turns before exactly
(`History`), so that a turn computes only its own. Thread-safety: one thread at a time; several
conversations of an LLM may have a thread each.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from flexinfer.engine.detokenizer import IncrementalDetokenizer
from flexinfer.engine.history import History, PlainFormat, choose_format
from flexinfer.errors import EngineError, ReleasedError, RequestError
from flexinfer.outputs import CompletionOutput, RequestOutput
from flexinfer.sampling.params import SamplingParams
from flexinfer.types import ChatMessage, Messages, TokensPrompt

if TYPE_CHECKING:
    from flexinfer.engine.llm_engine import LLMEngine
    from flexinfer.lora.request import LoRARequest

_pin_ids = count()


class Speaker(Protocol):
    """What a conversation asks of the `flexinfer.LLM` that it belongs to."""

    llm_engine: LLMEngine

    def get_tokenizer(self) -> Any: ...

    def get_default_sampling_params(self) -> SamplingParams: ...

    def generate(
        self,
        prompts: Any,
        sampling_params: Any = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> list[RequestOutput]: ...

    def stream(
        self,
        prompts: Any,
        sampling_params: Any = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Generator[RequestOutput, None, None]: ...


class Conversation:
    """
    with llm.conversation([{"role": "system", "content": "Be brief."}]) as chat:
        print(chat.say("Hello").outputs[0].text)
        with chat.fork() as other:
            print(other.say("Why?").outputs[0].text)

    Invariant: the KV of `token_ids`, as far as it was computed, is pinned until `close`.
    """

    def __init__(
        self,
        llm: Speaker,
        history: Messages | Sequence[int] = (),
        cache_salt: str = "",
        lora_request: LoRARequest | None = None,
    ) -> None:
        """`history`: messages of a chat, or token ids. Nothing is computed yet."""
        self._pin: str | None = None
        self._closed = False
        self._llm = llm
        self._cache_salt = cache_salt
        self._lora_request = lora_request
        self._kv_salt = llm.llm_engine.kv_salt(cache_salt, lora_request)
        if not llm.llm_engine.config.enable_prefix_caching:
            raise RequestError("a conversation needs enable_prefix_caching: it keeps its prefix")
        given: Any = history
        if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable):
            raise RequestError(f"a conversation starts from messages or tokens, got {given!r}")
        items: list[Any] = list(given)
        is_chat = bool(items) and isinstance(items[0], dict)
        self._format = choose_format(llm.get_tokenizer())
        end_ids = llm.llm_engine.loaded.eos_token_ids
        self._history = History(self._format, items if is_chat else (), end_ids)
        if not is_chat:
            self._history.token_ids = items

    @property
    def messages(self) -> list[ChatMessage]:
        """What was said, by turns; empty if the conversation goes by tokens."""
        return self._history.messages

    @property
    def token_ids(self) -> list[int]:
        """What the model has seen and said."""
        return self._history.token_ids

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template; else messages are plain "User: ..." text."""
        return not isinstance(self._format, PlainFormat)

    def say(self, content: str, sampling_params: SamplingParams | None = None) -> RequestOutput:
        """The user's next message, and the assistant's answer to it."""
        prompt, params = self._ask(content, sampling_params)
        try:
            output = self._complete(prompt, params)
        except BaseException:
            self._history.take_back()
            raise
        self._answered(prompt, output.outputs[0], params)
        return output

    def stream(
        self, content: str, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """`say`, yielding what is new at each step, as it comes.

        Nothing happens before the first output is asked for. Closing the iterator early ends the
        answer; what was said until then stays.
        """
        prompt, params = self._ask(content, sampling_params)
        said = CompletionOutput(0, "", [])
        is_kept = False
        try:
            tokens, lora = [self._tokens(prompt)], self._lora_request
            with closing(self._llm.stream(tokens, params, lora_request=lora)) as outputs:
                for output in outputs:
                    for part in output.outputs:
                        said.text += part.text
                        said.token_ids += part.token_ids
                        said.finish_reason, said.stop_reason = part.finish_reason, part.stop_reason
                    yield output
            _check_ended_well(said)
            is_kept = True
        except GeneratorExit:
            is_kept = len(said.token_ids) > 0
            raise
        finally:
            if is_kept:
                self._answered(prompt, said, params)
            else:
                self._history.take_back()

    def take_back(self) -> str | None:
        """Forget the last turn of messages; returns what the user said, None if there is none."""
        self._check_open()
        said = self._history.take_back()
        if said is not None:
            self._keep()
        return said

    def append(self, token_ids: Sequence[int]) -> None:
        """Tokens that come next; they are computed with the next `generate`."""
        self._check_open()
        if self.messages:
            raise RequestError("this conversation goes by messages: use say")
        self._history.token_ids = [*self.token_ids, *token_ids]

    def generate(self, sampling_params: SamplingParams | None = None) -> RequestOutput:
        """Go on from the tokens so far; what is generated becomes part of them."""
        self._check_open()
        if self.messages:
            raise RequestError("this conversation goes by messages: use say")
        prompt = self.token_ids
        output = self._complete(prompt, sampling_params)
        self._history.token_ids = [*prompt, *output.outputs[0].token_ids]
        self._keep_what_was_computed()
        return output

    def fork(self) -> Conversation:
        """A second conversation with the same past. Costs no memory and no time."""
        self._check_open()
        fork = Conversation(self._llm, (), self._cache_salt, self._lora_request)
        fork._history = self._history.fork()
        fork._keep()
        return fork

    def close(self) -> None:
        """Let the KV be evicted; while the engine sleeps, at `wake_up`. May be called again."""
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

    def _ask(self, content: str, params: SamplingParams | None) -> tuple[list[int], SamplingParams]:
        """The prompt for a message. The history waits for the answer, or for `take_back`."""
        self._check_open()
        if not isinstance(content, str):
            raise RequestError(f"what the user says must be text, got {content!r}")
        if self.token_ids and not self.messages:
            raise RequestError("this conversation goes by token ids: use append and generate")
        if self._llm.get_tokenizer() is None:
            raise RequestError("messages need a tokenizer, and this engine has none")
        params = params or self._llm.get_default_sampling_params()
        _check_one_answer(params)
        if not self.has_template:
            params = replace(params, stop=[*params.stop_strings, PlainFormat.STOP])
        return self._history.ask(content), params

    def _complete(self, prompt: list[int], params: SamplingParams | None) -> RequestOutput:
        """The conversation is as before if this raises, or ends with an error."""
        _check_one_answer(params)
        (output,) = self._llm.generate(
            [self._tokens(prompt)], params, use_tqdm=False, lora_request=self._lora_request
        )
        _check_ended_well(output.outputs[0])
        return output

    def _tokens(self, prompt: list[int]) -> TokensPrompt:
        return {"prompt_token_ids": prompt, "cache_salt": self._cache_salt}

    def _answered(
        self, prompt: list[int], answer: CompletionOutput, params: SamplingParams
    ) -> None:
        said = self._without_stop_string(prompt, answer, params)
        self._history.answer(prompt, said, answer.text)
        self._keep_what_was_computed()

    def _without_stop_string(
        self, prompt: list[int], answer: CompletionOutput, params: SamplingParams
    ) -> list[int]:
        """The answer's tokens without those of a stop string, which is not part of the text."""
        tokens = list(answer.token_ids)
        if not isinstance(answer.stop_reason, str):
            return tokens
        detokenizer = IncrementalDetokenizer(
            self._llm.get_tokenizer(), prompt, skip_special_tokens=params.skip_special_tokens
        )
        length = num_said = 0
        for number, token in enumerate(tokens, 1):
            text = detokenizer.append(token)
            length += len(text)
            if length > len(answer.text):
                return tokens[:num_said]
            if text:  # else of a character that the next ones end, perhaps in the stop string
                num_said = number
        return tokens

    def _keep_what_was_computed(self) -> None:
        """An adapter may have been loaded anew since the turn before."""
        engine = self._llm.llm_engine
        self._kv_salt = engine.kv_salt(self._cache_salt, self._lora_request)
        self._keep()

    def _keep(self) -> None:
        """Pin what is recorded of the tokens, then let the pin of the turn before go. Asleep, the
        engine pins nothing: what was pinned stays so until the next turn."""
        if not self.token_ids:
            self._unpin()
            return
        pin = f"conversation {next(_pin_ids)}"
        engine = self._llm.llm_engine
        snapshots = engine.scheduler.states.snapshots
        try:
            snapshots.pin_prefix(self.token_ids, pin, None, self._kv_salt)
        except ValueError:
            if not engine.manager.asleep:
                raise
            return
        self._unpin()
        self._pin = pin

    def _unpin(self) -> None:
        engine = self._llm.llm_engine
        if self._pin is not None and not engine.manager.closed:
            engine.scheduler.pins.drop(self._pin)
        self._pin = None

    def _check_open(self) -> None:
        if self._closed:
            raise ReleasedError("the conversation is closed")


def _check_one_answer(params: SamplingParams | None) -> None:
    if params is not None and params.num_samples != 1:
        raise RequestError(
            f"a conversation goes on with one answer, got n={params.n}: fork it instead"
        )


def _check_ended_well(answer: CompletionOutput) -> None:
    if answer.finish_reason in ("abort", "error"):
        raise EngineError(f"the turn ended with {answer.finish_reason}: {answer.stop_reason}")
