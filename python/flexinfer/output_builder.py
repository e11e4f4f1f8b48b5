"""OutputBuilder: the caller's side of one request: its text, log probabilities and outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flexinfer.detokenizer import IncrementalDetokenizer, StopStrings
from flexinfer.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from flexinfer.request import Request
from flexinfer.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from flexinfer.sampler import RowLogprobs


class OutputBuilder:
    """Follows a request token by token; `build()` gives what the caller is to see."""

    def __init__(self, request: Request, prompt: str | None, tokenizer: Any | None) -> None:
        params = request.params
        self.request = request
        self._prompt = prompt
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
        self._logprobs: list[TokenLogprobs] = []
        self._cumulative_logprob = 0.0
        self._num_tokens_shown = 0

    def update(self, token_id: int, logprobs: RowLogprobs | None) -> None:
        """The request got this token. A stop string that it completes ends the request."""
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
            stop = self._text.append(self._detokenizer.append(token_id), check=check)
            if stop is not None:
                request.finish("stop", stop)
                return
        if request.is_finished:
            self._text.append(self._detokenizer.flush(), check=False)

    def build(self) -> RequestOutput | None:
        """The next output of this request; None if its output_kind wants none now."""
        kind = self.request.params.output_kind
        finished = self.request.is_finished
        if kind is RequestOutputKind.FINAL_ONLY and not finished:
            return None
        first = self._num_tokens_shown if kind is RequestOutputKind.DELTA else 0
        if kind is RequestOutputKind.DELTA:
            text = self._text.take(finished=finished)
        else:
            text = self._text.shown(finished=finished)
        self._num_tokens_shown = self.request.num_output_tokens
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self._prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=[self._completion(text, first)],
            finished=finished,
            metrics=self.request.metrics,
            num_cached_tokens=self.request.num_cached_tokens,
        )

    def _completion(self, text: str, first: int) -> CompletionOutput:
        """The completion from its token number `first` on."""
        request = self.request
        wants_logprobs = request.params.logprobs is not None
        return CompletionOutput(
            index=0,
            text=text,
            token_ids=request.output_token_ids[first:],
            cumulative_logprob=self._cumulative_logprob if wants_logprobs else None,
            logprobs=self._logprobs[first:] if wants_logprobs else None,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )

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
