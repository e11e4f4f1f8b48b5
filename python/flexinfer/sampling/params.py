"""SamplingParams and BeamSearchParams: how a request's tokens are chosen and when it ends.

Names, defaults and meaning are those of vLLM, early stopping that of transformers. Checked where
they are made, without torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from enum import Enum
from typing import Any, Literal, Self

from flexinfer.runtime.numbers import flag, real, whole, whole_list
from flexinfer.sampling.assignable import Assignable
from flexinfer.sampling.grammars import StructuredOutputsParams

GREEDY_EPS = 1e-5
"""A temperature below this is greedy (the logits would overflow)."""
NO_TOKEN_LEFT = "the sampling parameters leave no token that could be chosen"
"""Why a request ends whose allowed tokens, structure and bad words exclude each other."""


NOT_SERVED: Mapping[str, tuple[Any, str]] = {
    "spaces_between_special_tokens": (True, "special tokens are written as they are decoded"),
    "flat_logprobs": (False, "log probabilities are a list of dicts"),
    "skip_reading_prefix_cache": (
        False,
        "a cache_salt of its own gives a prompt a cache of its own",
    ),
    "thinking_token_budget": (None, "max_tokens bounds thoughts and answer together"),
    "logprob_token_ids": (None, "logprobs=-1 reports all tokens"),
    "repetition_detection": (None, "repetition_penalty and frequency_penalty work against loops"),
    "watermarking": (None, "there is none"),
    "extra_args": (None, "there is nobody to read them"),
    "logits_processors": (None, "logit_bias, allowed_token_ids, bad_words, structured_outputs do"),
    "guided_decoding": (None, "structured_outputs=StructuredOutputsParams(...) is its newer name"),
    "truncate_prompt_tokens": (None, "cut the prompt before it is given"),
}
"""What vLLM has, or had, beside the fields below -> what there is without it, and what to do."""


class RequestOutputKind(Enum):
    """What each RequestOutput of a request carries."""

    CUMULATIVE = 0
    """Everything generated so far, at every step."""
    DELTA = 1
    """What is new since the previous output of the request."""
    FINAL_ONLY = 2
    """One output, when the request has ended."""


@dataclass(kw_only=True)
class SamplingParams(Assignable):
    """Sampling of one request.

    Steps, in this order: logit_bias and min_tokens, repetition then frequency then presence
    penalty, structured outputs with allowed_token_ids and bad_words, temperature, min_p, top_k,
    top_p. Log probabilities are those of the model itself, before any of these steps.
    """

    n: int = 1
    """Number of completions, sampled from one prompt whose KV is held once."""
    best_of: int | None = None
    """Sample this many and give the n most probable ones, by cumulative_logprob; None: n."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 or -1: all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches p, in (0, 1]."""
    min_p: float = 0.0
    """Drop tokens less probable than min_p times the most probable one."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that occur in the output."""
    frequency_penalty: float = 0.0
    """Subtracted once for each occurrence in the output."""
    seed: int | None = None
    """Own random numbers, whatever else is in the batch; None, or -1: those of the engine.

    Sample i of n uses seed + i (and passes over -1)."""
    stop: str | Sequence[str] | None = None
    """Strings that end the request."""
    stop_token_ids: Sequence[int] | None = None
    """Tokens that end the request, like the end-of-sequence token."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """Most tokens to generate; None: as many as max_model_len admits."""
    min_tokens: int = 0
    """No stop token and no stop string counts before this many tokens."""
    logprobs: int | None = None
    """Report this many most probable tokens at each position (and the chosen one); -1: all. True
    is 1."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens, each given those before it; -1: all. The whole prompt is
    computed then, whatever the prefix cache has."""
    logit_bias: Mapping[int, float] | None = None
    """Token id -> value added to its logit, clamped to [-100, 100]."""
    allowed_token_ids: Sequence[int] | None = None
    """Only these are drawn; the end-of-sequence token is, too, only if it is one of them."""
    bad_words: Sequence[str] | None = None
    """Texts that are not said, at the beginning of a word or within one: the last token of each is
    not drawn where it would complete it."""
    bad_words_token_ids: Sequence[Sequence[int]] | None = None
    """The same as tokens; the engine adds those of `bad_words`."""
    structured_outputs: StructuredOutputsParams | None = None
    """What the text must look like; the request ends when it is complete."""
    detokenize: bool = True
    skip_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    # Of NOT_SERVED, in its order: what says no more than its default is taken.
    spaces_between_special_tokens: InitVar[bool] = True
    flat_logprobs: InitVar[bool] = False
    skip_reading_prefix_cache: InitVar[bool | None] = None
    thinking_token_budget: InitVar[int | None] = None
    logprob_token_ids: InitVar[Any] = None
    repetition_detection: InitVar[Any] = None
    watermarking: InitVar[bool | None] = None
    extra_args: InitVar[Any] = None
    logits_processors: InitVar[Any] = None
    guided_decoding: InitVar[Any] = None
    truncate_prompt_tokens: InitVar[int | None] = None

    stop_strings: tuple[str, ...] = field(init=False, repr=False, default=())
    """`stop` as a tuple."""
    stop_ids: frozenset[int] = field(init=False, repr=False, default=frozenset())
    """`stop_token_ids` as a set."""

    def __post_init__(self, *not_served: Any) -> None:
        _refuse_others(not_served)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is True:
                object.__setattr__(self, name, 1)
        _read(self, whole, "n", "top_k", "min_tokens")
        _read_given(self, whole, "best_of", "seed", "max_tokens", "logprobs", "prompt_logprobs")
        if self.seed == -1:
            self.seed = None
        _read(self, real, "temperature", "top_p", "min_p", "repetition_penalty")
        _read(self, real, "presence_penalty", "frequency_penalty")
        _read(self, flag, "include_stop_str_in_output", "ignore_eos", "detokenize")
        _read(self, flag, "skip_special_tokens")
        _read_given(self, _token_ids, "stop_token_ids", "allowed_token_ids")
        _read_given(self, _words, "bad_words_token_ids")
        _read_given(self, _biases, "logit_bias")
        _read_given(self, _texts, "bad_words")
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        texts = _texts("stop", () if stop is None else stop)
        object.__setattr__(self, "stop_strings", tuple(texts))
        object.__setattr__(self, "stop_ids", frozenset(self.stop_token_ids or ()))
        self._check_number()
        self._check_sampling()
        self._check_vocabulary()
        self._check_ending()
        self._check_reporting()
        self._is_made = True

    @classmethod
    def from_optional(cls, **given: Any) -> Self:
        """The same, where None means the default; of max_tokens it means no bound, as ever. The
        token ids of logit_bias may be texts, as JSON has them."""
        kept = {k: v for k, v in given.items() if v is not None or k == "max_tokens"}
        biases = kept.get("logit_bias")
        if isinstance(biases, Mapping):
            kept["logit_bias"] = {_number(key): bias for key, bias in biases.items()}
        return cls(**kept)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_EPS

    @property
    def num_samples(self) -> int:
        """Sequences that are sampled, of which `n` are given."""
        return self.n if self.best_of is None else self.best_of

    def of_sample(self, index: int) -> SamplingParams:
        """The params of one of the samples; `index` counts from 0."""
        if self.num_samples == 1:
            return self
        ranked, seed = self.num_samples > self.n, self.seed
        if seed is not None:
            seed += index + (seed < -1 <= seed + index)  # -1 would be none
        return replace(
            self,
            n=1,
            best_of=None,
            seed=seed,
            logprobs=0 if ranked and self.logprobs is None else self.logprobs,
            prompt_logprobs=self.prompt_logprobs if index == 0 else None,
        )

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def _check_number(self) -> None:
        if self.n < 1:
            raise ValueError(f"n must be at least 1, got {self.n}")
        if self.best_of is None:
            return
        if self.best_of < self.n:
            raise ValueError(f"best_of must be at least n, got best_of={self.best_of}, n={self.n}")
        if self.best_of > self.n and self.output_kind is RequestOutputKind.DELTA:
            raise ValueError(
                f"best_of ({self.best_of}) larger than n ({self.n}) has no DELTA output: "
                "which samples are the best is known at the end"
            )

    def _check_sampling(self) -> None:
        _within("temperature", self.temperature, 0.0, math.inf, "at least 0 (0 is greedy)")
        if self.top_k < -1:
            raise ValueError(f"top_k must be at least 1, or 0 or -1 for off, got {self.top_k}")
        _within("top_p", self.top_p, 0.0, 1.0, "in (0, 1]", low_open=True)
        _within("min_p", self.min_p, 0.0, 1.0, "in [0, 1]")
        # Beyond these float32 scores become infinite.
        _within("repetition_penalty", self.repetition_penalty, 1e-6, 1e6, "in [1e-6, 1e6]")
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0, "in [-2, 2]")
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "in [-2, 2]")
        if self.seed is not None:
            last = self.seed + self.num_samples - 1
            if not -(2**63) <= self.seed <= last < 2**63:
                raise ValueError(f"seed must be a 64-bit integer, got {self.seed}")

    def _check_vocabulary(self) -> None:
        if self.allowed_token_ids == []:
            raise ValueError("allowed_token_ids must not be empty: no token could be drawn")
        if not all(self.bad_words_token_ids or ()):
            raise ValueError("bad_words_token_ids must hold non-empty lists of token ids")

    def _check_ending(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens must be at least 0, got {self.min_tokens}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens ({self.min_tokens}) must be at most max_tokens ({self.max_tokens})"
            )
        if self.stop_strings and not self.detokenize:
            raise ValueError("stop strings need the text: detokenize must be True")
        if self.structured_outputs is None:
            return
        if not isinstance(self.structured_outputs, StructuredOutputsParams):
            raise ValueError(
                "structured_outputs must be StructuredOutputsParams, "
                f"got {self.structured_outputs!r}"
            )
        if self.ignore_eos or self.min_tokens:
            raise ValueError(
                "structured outputs end when the text is complete: "
                "they take neither ignore_eos nor min_tokens"
            )

    def _check_reporting(self) -> None:
        if self.logprobs is not None and self.logprobs < -1:
            raise ValueError(f"logprobs must be at least 0, or -1 for all, got {self.logprobs}")
        asked = self.prompt_logprobs
        if asked is not None and asked < -1:
            raise ValueError(f"prompt_logprobs must be at least 0, or -1 for all, got {asked}")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise ValueError(f"output_kind must be a RequestOutputKind, got {self.output_kind!r}")


@dataclass(kw_only=True)
class BeamSearchParams(Assignable):
    """Beam search of one request.

    A finished sequence scores cum_logprob / num_generated ** length_penalty, its end-of-sequence
    token counted, as in transformers. (vLLM counts the prompt and not the end-of-sequence token.)
    """

    beam_width: int
    """Sequences kept at each step, and given at the end."""
    max_tokens: int = 16
    """Most tokens to generate."""
    ignore_eos: bool = False
    temperature: float = 0.0
    """Only 0: sequences are ranked by the model's own probabilities."""
    length_penalty: float = 1.0
    """Above 0 favours long sequences, below 0 short ones. The engine refuses one so large that
    scores overflow."""
    early_stopping: bool | Literal["never"] = False
    """When to end with beam_width finished sequences at hand: True: at once; False: when no
    running beam would beat them at its present length; "never": when none can, whatever its
    length will be."""

    def __post_init__(self) -> None:
        _read(self, whole, "beam_width", "max_tokens")
        _read(self, real, "temperature", "length_penalty")
        _read(self, flag, "ignore_eos")
        if self.beam_width < 1:
            raise ValueError(f"beam_width must be at least 1, got {self.beam_width}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        _within(
            "temperature", self.temperature, 0.0, 0.0, "0 with beam search (it does not sample)"
        )
        _read(self, _early_stopping, "early_stopping")
        self._is_made = True


def _refuse_others(given: Iterable[Any]) -> None:
    for (name, (unset, instead)), value in zip(NOT_SERVED.items(), given, strict=True):
        if value is not None and value != unset:
            raise ValueError(f"{name}={value!r} is not served here: {instead}")


def _read(params: Any, read: Callable[[str, Any], Any], *names: str) -> None:
    """Have these fields hold what `read` makes of them."""
    for name in names:
        object.__setattr__(params, name, read(name, getattr(params, name)))


def _read_given(params: Any, read: Callable[[str, Any], Any], *names: str) -> None:
    """The same of fields that may be None."""
    _read(params, read, *(name for name in names if getattr(params, name) is not None))


def _number(key: Any) -> Any:
    return int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() else key


def _token_ids(name: str, given: Any) -> list[int]:
    token_ids = whole_list(name, given)
    if (least := min(token_ids, default=0)) < 0:
        raise ValueError(f"{name} must hold token ids (at least 0), got {least}")
    return token_ids


def _words(name: str, given: Any) -> list[list[int]]:
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise ValueError(f"{name} must be a list of lists of token ids, got {given!r}")
    return [_token_ids(f"{name}[{place}]", word) for place, word in enumerate(given)]


def _biases(name: str, given: Any) -> dict[int, float]:
    if not isinstance(given, Mapping):
        raise ValueError(f"{name} must be a mapping from token ids to numbers, got {given!r}")
    token_ids = _token_ids(name, [whole(f"{name}: a token id", key) for key in given])
    values = [real(f"{name}[{key!r}]", value) for key, value in given.items()]
    return dict(zip(token_ids, values, strict=True))


def _texts(name: str, given: Any) -> list[str]:
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise ValueError(f"{name} must be a list of texts, got {given!r}")
    texts = list(given)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ValueError(f"{name} must hold non-empty strings, got {text!r}")
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            raise ValueError(f"{name} has half a surrogate pair, which no text has: {text!r}")
    return texts


def _early_stopping(name: str, given: Any) -> bool | str:
    if isinstance(given, str) and given == "never":
        return given
    try:
        return flag(name, given)
    except ValueError:
        raise ValueError(f"{name} must be True, False or 'never', got {given!r}") from None


def _within(
    name: str, value: float, low: float, high: float, allowed: str, *, low_open: bool = False
) -> None:
    if value < low or value > high or (low_open and value == low):
        raise ValueError(f"{name} must be {allowed}, got {value}")
