"""From the fields of a request to the engine's SamplingParams or BeamSearchParams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flexinfer.sampling.grammars import StructuredOutputsParams
from flexinfer.sampling.params import BeamSearchParams, SamplingParams
from flexinfer.sampling.token_filter import MAX_BAD_WORDS
from flexinfer.server.http.errors import bad_request, invalid_field
from flexinfer.server.protocol.sampling import ResponseFormat, SamplingFields
from flexinfer.server.state import ServerState

MAX_STOP_STRINGS = 64
MAX_CHARS = 8192
"""Of stop strings in all, and of bad words: each new token is searched for the former while all
requests wait."""
SAME_NAME = (
    "n",
    "best_of",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "allowed_token_ids",
    "bad_words",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
)

NOT_FOR_BEAMS = {*SAME_NAME, "logit_bias"} - {
    *("n", "best_of", "temperature", "seed", "ignore_eos", "include_stop_str_in_output"),
    "skip_special_tokens",
}
"""The most probable sequences are searched, as the model has them: none is drawn."""


def sampling_params(
    state: ServerState,
    fields: SamplingFields,
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    structure: StructuredOutputsParams | None = None,
) -> SamplingParams:
    """With the defaults of the model and the operator for what is left out, which null is, too.
    Raises APIError for what the engine would refuse. `structure`: what tool calls need."""
    _check_fields(state, fields, logprobs)
    defaults = state.llm.sampling_defaults
    given = {name: getattr(fields, name) for name in SAME_NAME}
    asked = structured_outputs(fields)
    # A response_format is of the text, and a forced call has none; clients send both.
    if asked is not None and structure is not None and fields.response_format is None:
        raise bad_request(
            "a forced tool call cannot have a structure of its own as well", "tool_choice"
        )
    settings: dict[str, Any] = {
        **defaults.values,
        **{name: value for name, value in given.items() if value is not None},
        "max_tokens": defaults.max_tokens if max_tokens is None else max_tokens,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "logit_bias": logit_bias(fields),
        "structured_outputs": structure or asked,
    }
    try:
        return SamplingParams(**settings)
    except ValueError as error:
        raise invalid_field(error) from None


def beam_params(
    state: ServerState, fields: SamplingFields, *, max_tokens: int | None
) -> BeamSearchParams:
    """As in vLLM, `n` (or `best_of`) is the number of beams, and of the defaults only the length
    concerns them. Raises APIError."""
    if max_tokens is None:
        max_tokens = state.llm.sampling_defaults.max_tokens
    _check_fields(state, fields, None)
    if fields.wants_stream:
        raise bad_request(
            "beam search has its sequences only at the end and cannot stream", "stream"
        )
    if structured_outputs(fields) is not None:
        raise bad_request("beam search does not take structured outputs", "response_format")
    plain = SamplingParams()
    for name in NOT_FOR_BEAMS:
        value = getattr(fields, name)
        if value and value != getattr(plain, name) and (name, value) != ("top_k", -1):
            raise bad_request(f"{name} does not go with beam search", name)
    optional = {"length_penalty": fields.length_penalty, "early_stopping": fields.early_stopping}
    try:
        return BeamSearchParams(
            beam_width=fields.best_of or fields.n or 1,
            max_tokens=state.llm.max_model_len if max_tokens is None else max_tokens,
            ignore_eos=bool(fields.ignore_eos),
            temperature=fields.temperature or 0.0,
            **{k: v for k, v in optional.items() if v is not None},  # type: ignore[arg-type]
        )
    except ValueError as error:
        raise invalid_field(error) from None


ALIASES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}
"""Fields of older vLLM, SGLang and llama.cpp that ask for a structure -> what it is called here."""


def structured_outputs(fields: SamplingFields) -> StructuredOutputsParams | None:
    """What `structured_outputs`, `response_format` or an alias says. Raises APIError for two."""
    asked: dict[str, StructuredOutputsParams] = {}
    by_format = _of_response_format(fields.response_format)
    if by_format is not None:
        asked["response_format"] = by_format
    given = fields.structured_outputs
    if given is not None:
        kinds = {"json": given.json_} | given.model_dump(exclude={"json_"})
        asked["structured_outputs"] = _structure("structured_outputs", kinds)
    for name, kind in ALIASES.items():
        value = getattr(fields, name)
        if value not in (None, False):
            asked[name] = _structure(name, {kind: value})
    if len(asked) > 1:
        names = list(asked)
        raise bad_request(f"{' and '.join(names)} exclude each other", names[-1])
    return next(iter(asked.values()), None)


def _structure(name: str, kinds: dict[str, Any]) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams(**kinds)
    except ValueError as error:
        raise bad_request(str(error), name) from None


def logit_bias(fields: SamplingFields) -> dict[int, float] | None:
    """JSON has only text as keys."""
    given = fields.logit_bias or {}
    wrong = [key for key in given if not (key.isascii() and key.isdecimal())]
    if wrong:
        named = ", ".join(repr(key[:32]) for key in wrong[:8]) + (", ..." if wrong[8:] else "")
        raise bad_request(f"the keys of logit_bias must be token ids, not {named}", "logit_bias")
    return {int(key): bias for key, bias in given.items()} or None


def _of_response_format(wanted: ResponseFormat | None) -> StructuredOutputsParams | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        if wanted.schema_ is not None:
            return _structure("response_format", {"json": wanted.schema_})
        return StructuredOutputsParams(json_object=True)
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise bad_request(
            'response_format "json_schema" needs json_schema.schema', "response_format"
        )
    return StructuredOutputsParams(
        json=wanted.json_schema.schema_, is_lenient=not wanted.json_schema.strict
    )


def _check_fields(state: ServerState, fields: SamplingFields, logprobs: int | None) -> None:
    for name in ("n", "best_of"):
        value = getattr(fields, name)
        if value is not None and value > state.max_n:
            raise bad_request(f"{name} must be at most {state.max_n}, got {value}", name)
    asked = getattr(fields, "prompt_logprobs", None)
    _check_logprobs(state, "prompt_logprobs", asked)
    if asked is not None and fields.wants_stream:
        raise bad_request("prompt_logprobs are not streamed", "prompt_logprobs")
    is_chat = getattr(fields, "logprobs", None) is True
    _check_logprobs(state, "top_logprobs" if is_chat else "logprobs", logprobs)
    if fields.stream_options is not None and not fields.stream:
        raise bad_request("stream_options is only allowed with stream", "stream_options")
    vocab_size = state.llm.inputs.vocab_size
    for name in ("stop_token_ids", "allowed_token_ids"):
        unknown = next((one for one in getattr(fields, name) or () if one >= vocab_size), None)
        if unknown is not None:
            raise bad_request(f"{name} has {unknown}, which is not in [0, {vocab_size})", name)
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop or ()
    _check_texts("stop", stops, MAX_STOP_STRINGS)
    _check_texts("bad_words", fields.bad_words or (), MAX_BAD_WORDS)


def _check_logprobs(state: ServerState, name: str, asked: int | None) -> None:
    most, vocab_size = state.settings.max_logprobs, state.llm.inputs.vocab_size
    if asked is None or 0 <= asked <= most or (asked == -1 and vocab_size <= most):
        return
    given = f"-1, which is all {vocab_size}" if asked == -1 else str(asked)
    raise bad_request(
        f"at most {most} log probabilities per token (the server's --max-logprobs), got {given}",
        name,
    )


def _check_texts(name: str, texts: Sequence[str], max_texts: int) -> None:
    if len(texts) > max_texts:
        raise bad_request(f"{name} has more than {max_texts} strings", name)
    num_chars = sum(map(len, texts))
    if num_chars > MAX_CHARS:
        raise bad_request(f"{name} has {num_chars} characters, of at most {MAX_CHARS}", name)
