"""From the fields of a request to the engine's SamplingParams or BeamSearchParams."""

from __future__ import annotations

from typing import Any

from flexinfer.sampling.grammars import StructuredOutputsParams
from flexinfer.sampling.params import BeamSearchParams, SamplingParams
from flexinfer.server.http.errors import bad_request, invalid_field
from flexinfer.server.protocol.base import ResponseFormat, SamplingFields
from flexinfer.server.state import ServerState

MAX_STOP_STRINGS = 64
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
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
)


def sampling_params(
    state: ServerState,
    fields: SamplingFields,
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    structure: StructuredOutputsParams | None = None,
) -> SamplingParams:
    """Raises APIError for what the engine would refuse. `structure`: what tool calls need."""
    _check_numbers(state, fields, logprobs)
    given = {name: getattr(fields, name) for name in SAME_NAME}
    asked = structured_outputs(fields)
    if asked is not None and structure is not None:
        raise bad_request("a forced tool call takes no format of its own", "tool_choice")
    settings: dict[str, Any] = {
        **{name: value for name, value in given.items() if value is not None},
        "max_tokens": max_tokens,
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
    """As in vLLM, `n` (or `best_of`) is the number of beams. Raises APIError."""
    _check_numbers(state, fields, None)
    if fields.wants_stream:
        raise bad_request("beam search knows its sequences only at the end: no stream", "stream")
    if structured_outputs(fields) is not None:
        raise bad_request("beam search does not take structured outputs", "response_format")
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


def structured_outputs(fields: SamplingFields) -> StructuredOutputsParams | None:
    """What `structured_outputs` or `response_format` asks for. Raises APIError for both."""
    by_format = _of_response_format(fields.response_format)
    given = fields.structured_outputs
    if given is None:
        return by_format
    if by_format is not None:
        raise bad_request(
            "response_format and structured_outputs exclude each other", "structured_outputs"
        )
    try:
        return StructuredOutputsParams(
            json=given.json_,
            regex=given.regex,
            choice=given.choice,
            grammar=given.grammar,
            json_object=given.json_object,
        )
    except ValueError as error:
        raise bad_request(str(error), "structured_outputs") from None


def logit_bias(fields: SamplingFields) -> dict[int, float] | None:
    """JSON has only text as keys."""
    try:
        return {int(key): bias for key, bias in (fields.logit_bias or {}).items()} or None
    except ValueError:
        raise bad_request("the keys of logit_bias must be token ids", "logit_bias") from None


def _of_response_format(wanted: ResponseFormat | None) -> StructuredOutputsParams | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise bad_request(
            'response_format "json_schema" needs json_schema.schema', "response_format"
        )
    return StructuredOutputsParams(json=wanted.json_schema.schema_)


def _check_numbers(state: ServerState, fields: SamplingFields, logprobs: int | None) -> None:
    for name in ("n", "best_of"):
        value = getattr(fields, name)
        if value is not None and value > state.max_n:
            raise bad_request(f"{name} must be at most {state.max_n}, got {value}", name)
    if logprobs is not None and logprobs > state.settings.max_logprobs:
        raise bad_request(
            f"at most {state.settings.max_logprobs} log probabilities a token, got {logprobs}",
            "top_logprobs" if hasattr(fields, "top_logprobs") else "logprobs",
        )
    if isinstance(fields.stop, list) and len(fields.stop) > MAX_STOP_STRINGS:
        raise bad_request(f"stop has more than {MAX_STOP_STRINGS} strings", "stop")
