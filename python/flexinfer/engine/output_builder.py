"""OutputBuilder: the caller's side of one sequence: its text and log probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flexinfer.engine.detokenizer import IncrementalDetokenizer, StopStrings, special_texts
from flexinfer.engine.stream_pace import StreamPace
from flexinfer.outputs import CompletionOutput, Logprob, TokenLogprobs
from flexinfer.sampling.params import RequestOutputKind
from flexinfer.scheduler.request import Request

if TYPE_CHECKING:
    from flexinfer.runner.plan import SampledToken
    from flexinfer.sampling.logprobs import RowLogprobs


class OutputBuilder:
    """Follows a request token by token; `build()` gives what the caller is to see."""

    def __init__(self, request: Request, tokenizer: Any | None, pace: StreamPace) -> None:
        params = request.params
        self._pace = pace
        self.request = request
        self._tokenizer = tokenizer
        self._text = StopStrings(
            params.stop_strings, include_in_output=params.include_stop_str_in_output
        )
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer,
                request.prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
            )
        self._special: dict[int, str] = {}
        if params.stop_strings and not params.skip_special_tokens:
            self._special = special_texts(tokenizer)
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._cumulative_logprob = 0.0
        self._num_tokens_shown = 0
        self._end_shown = False

    def update(self, token: SampledToken) -> None:
        """The request got this token. A stop string that it completes ends the request."""
        token_id, logprobs = token.token_id, token.logprobs
        if token.prompt_logprobs is not None:
            pairs = zip(self.request.prompt_token_ids[1:], token.prompt_logprobs, strict=True)
            self._prompt_logprobs = [None, *(self._decode_logprobs(t, row) for t, row in pairs)]
        if logprobs is not None:
            self._logprobs.append(self._decode_logprobs(token_id, logprobs))
            self._cumulative_logprob += logprobs.sampled
        if self._detokenizer is None:
            return
        request = self.request
        by_token = request.finish_reason == "stop"
        if not by_token or request.params.include_stop_str_in_output:
            # vLLM's rule: stop strings count only after min_tokens tokens.
            check = request.num_output_tokens > request.params.min_tokens
            text, special = self._detokenizer.append(token_id), self._special.get(token_id, "")
            stop = self._text.append(text, check=check, special=special)
            if stop is not None:
                request.finish("stop", stop)
                return
        if request.is_finished:
            self._text.append(self._detokenizer.flush(), check=False)

    @property
    def cumulative_logprob(self) -> float:
        """0 as long as log probabilities are not asked for."""
        return self._cumulative_logprob

    @property
    def is_due(self) -> bool:
        """Whether the first token or the end is there to be shown, or later ones at their time."""
        request = self.request
        if request.is_finished:
            return not self._end_shown
        num_new = request.num_output_tokens - self._num_tokens_shown
        return num_new > 0 and (self._num_tokens_shown == 0 or self._pace.is_due(num_new))

    def build(self) -> CompletionOutput:
        """The completion as `output_kind` wants it: all of it, or what is new since the last."""
        request = self.request
        finished = request.is_finished
        first = 0
        if request.params.output_kind is RequestOutputKind.DELTA:
            first = self._num_tokens_shown
            text = self._text.take(finished=finished)
        else:
            text = self._text.shown(finished=finished)
        self._num_tokens_shown = request.num_output_tokens
        self._end_shown = finished
        wants_logprobs = request.params.logprobs is not None
        return CompletionOutput(
            index=request.index,
            text=text,
            token_ids=request.output_token_ids[first:],
            cumulative_logprob=self._cumulative_logprob if wants_logprobs else None,
            logprobs=self._logprobs[first:] if wants_logprobs else None,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """Of all prompt tokens, from the first token on; None if they are not asked for."""
        return self._prompt_logprobs

    def _decode_logprobs(self, token_id: int, row: RowLogprobs) -> TokenLogprobs:
        """The sampled token first, then the most probable ones."""
        found = {token_id: Logprob(row.sampled, row.sampled_rank, self._decode(token_id))}
        pairs = zip(row.top_token_ids, row.top_logprobs, strict=True)
        for rank, (top_id, logprob) in enumerate(pairs, start=1):
            if top_id != token_id:
                found[top_id] = Logprob(logprob, rank, self._decode(top_id))
        return found

    def _decode(self, token_id: int) -> str | None:
        if self._detokenizer is None or self._tokenizer is None:
            return None
        text: str = self._tokenizer.decode([token_id])
        return text
