"""CompletionCall: one request for a completion, checked and tokenized, and its answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flexinfer.outputs import BeamSearchOutput, CompletionOutput, RequestOutput
from flexinfer.server.api import generate
from flexinfer.server.api.generate import Job
from flexinfer.server.api.logprobs import TextPlace, completion_logprobs, prompt_logprobs
from flexinfer.server.api.prompts import decode, make_prompt, tokenize, truncated
from flexinfer.server.api.sampling import beam_params, sampling_params
from flexinfer.server.http.errors import bad_request
from flexinfer.server.observability.logs import current_request_id
from flexinfer.server.protocol.completions import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from flexinfer.server.state import ServerState
from flexinfer.types import TokensPrompt


@dataclass(frozen=True)
class Echo:
    """A prompt as the text of a completion shows it."""

    text: str
    num_hidden: int = 0
    """Characters of tokens before it that the tokenizer has added, and nobody sent."""


NO_ECHO = Echo("")


@dataclass(frozen=True)
class CompletionCall:
    """One request, ready to be computed."""

    state: ServerState
    body: CompletionRequest
    job: Job
    echoes: Sequence[Echo]
    """Of the prompts; only with echo."""
    created: int

    @property
    def max_tokens(self) -> int | None:
        return self.body.max_tokens

    def index_of(self, prompt_idx: int, sample_idx: int) -> int:
        return prompt_idx * (self.body.n or 1) + sample_idx

    def echo_of(self, prompt_idx: int) -> Echo:
        return self.echoes[prompt_idx] if self.body.echo else NO_ECHO

    def asked_for(self, output: RequestOutput) -> RequestOutput:
        """The same without the token that the engine makes where echo alone was asked for."""
        if self.max_tokens == 0:
            for one in output.outputs:
                one.text, one.token_ids, one.logprobs = "", [], None
        return output

    def answer(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(
            id=self.job.request_id,
            created=self.created,
            model=self.body.model or self.state.settings.model_name,
            choices=choices,
            system_fingerprint=self.state.fingerprint,
        )

    def logprobs(
        self, output: RequestOutput, one: CompletionOutput, place: TextPlace, *, shows_prompt: bool
    ) -> CompletionLogprobs | None:
        """Of the new text, and before it of the prompt if that is shown; begins at `place`."""
        num_top = self.body.logprobs
        if num_top is None:
            return None
        entries = list(one.logprobs or ())
        first = None
        if shows_prompt:
            entries = [entry for entry in output.prompt_logprobs or () if entry] + entries
            first = decode(self.state, output.prompt_token_ids[:1], special_tokens=True)
        return completion_logprobs(entries, num_top, place, self.state.token_bytes, first)


async def prepare_completion(
    state: ServerState, tenant: str, body: CompletionRequest
) -> CompletionCall:
    """Raises APIError for what cannot be served."""
    if body.suffix:
        raise bad_request("suffix is not supported: models here only continue a prompt", "suffix")
    asked_tokens = 16 if body.max_tokens is None else body.max_tokens
    max_tokens = min(asked_tokens, state.llm.sampling_defaults.max_tokens_limit or asked_tokens)
    if max_tokens == 0 and not body.echo:
        raise bad_request("max_tokens 0 makes sense only with echo", "max_tokens")
    if body.use_beam_search:
        if body.echo or body.logprobs is not None or body.prompt_logprobs is not None:
            raise bad_request("beam search has neither echo nor logprobs", "use_beam_search")
        params: Any = beam_params(state, body, max_tokens=max_tokens)
    else:
        params = sampling_params(
            state,
            body,
            max_tokens=max(1, max_tokens),
            logprobs=body.logprobs,
            prompt_logprobs=_num_prompt_logprobs(body),
        )
    special = body.add_special_tokens is not False
    ids = [
        await tokenize(state, one, special_tokens=special) if isinstance(one, str) else one
        for one in _prompts(body)
    ]
    prompts: list[TokensPrompt] = [
        make_prompt(
            state,
            truncated(state, body, one, max_tokens),
            tenant,
            body.cache_salt,
            max_tokens=max(1, max_tokens),
            param="prompt",
            fields=body,
        )
        for one in ids
    ]
    if body.output_token_ids and len(prompts) > 1:
        raise bad_request("output_token_ids go with one prompt", "output_token_ids")
    echoes = []
    if body.echo:
        for sent, full, prompt in zip(_prompts(body), ids, prompts, strict=True):
            kept = prompt["prompt_token_ids"]
            text = sent if isinstance(sent, str) and kept == full else None
            if text is not None and body.logprobs is None:  # nobody asks where tokens begin
                echoes.append(Echo(text))
            else:
                echoes.append(await _echo(state, text, kept))
    name, adapter = f"cmpl-{current_request_id()}", state.choose(body.model)
    job = Job(name, tenant, prompts, params, body.priority or 0, adapter)
    return CompletionCall(state, body, job, echoes, int(time.time()))


async def _echo(state: ServerState, sent: str | None, token_ids: Sequence[int]) -> Echo:
    """A text as it was sent; of tokens their text, special ones included."""
    if sent is None:
        return Echo(decode(state, token_ids, special_tokens=True))
    bare = await tokenize(state, sent, special_tokens=False)
    num_added = len(token_ids) - len(bare)
    if num_added <= 0 or list(token_ids[num_added:]) != bare:
        return Echo(sent)
    return Echo(sent, len(decode(state, token_ids[:num_added], special_tokens=True)))


def _num_prompt_logprobs(body: CompletionRequest) -> int | None:
    """How many are computed: for `echo`, and asked for by name."""
    asked = (body.logprobs if body.echo else None, body.prompt_logprobs)
    if -1 in asked:
        return -1
    return max((one for one in asked if one is not None), default=None)


def _prompts(body: CompletionRequest) -> list[str] | list[list[int]]:
    """All prompts of a request, which may be one text, one list of ids, or a list of either."""
    prompt: Any = body.prompt
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    if not prompt:
        raise bad_request("the prompt is empty", "prompt")
    return list(prompt)


def final_choice(
    call: CompletionCall, prompt_idx: int, output: RequestOutput, one: CompletionOutput
) -> CompletionChoice:
    """A finished one."""
    echo = call.echo_of(prompt_idx)
    wants_ids = bool(call.body.return_token_ids)
    return CompletionChoice(
        index=call.index_of(prompt_idx, one.index),
        text=echo.text + one.text,
        logprobs=call.logprobs(
            output, one, TextPlace(echo.num_hidden), shows_prompt=bool(call.body.echo)
        ),
        finish_reason="length" if call.max_tokens == 0 else one.finish_reason,  # type: ignore[arg-type]
        stop_reason=one.stop_reason,
        token_ids=one.token_ids if wants_ids else None,
        prompt_token_ids=output.prompt_token_ids if wants_ids else None,
        prompt_logprobs=prompt_logprobs(output, call.body.prompt_logprobs),
    )


def beam_answer(call: CompletionCall, found: Sequence[BeamSearchOutput]) -> Completion:
    """The n best sequences of each prompt, best first."""
    n = call.body.n or 1
    choices, num_completion = [], 0
    special = call.body.skip_special_tokens is False
    for prompt_idx, output in enumerate(found):
        num_prompt = len(call.job.prompts[prompt_idx]["prompt_token_ids"])
        for index, sequence in enumerate(output.sequences[:n]):
            new = sequence.tokens[num_prompt:]
            num_completion += len(new)
            choices.append(
                CompletionChoice(
                    index=call.index_of(prompt_idx, index),
                    text=decode(call.state, new, special_tokens=special),
                    finish_reason=sequence.finish_reason,  # type: ignore[arg-type]
                )
            )
    answer = call.answer(choices)
    num_prompt = sum(len(prompt["prompt_token_ids"]) for prompt in call.job.prompts)
    answer.usage = generate.make_usage(num_prompt, num_completion, 0)
    return answer
