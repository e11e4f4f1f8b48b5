"""Every field that a client or another server knows is served, refused by name, or a mere hint."""

from __future__ import annotations

import typing
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, ValidationError

anthropic_types = pytest.importorskip("anthropic.types")

from openai.types.chat.completion_create_params import CompletionCreateParamsBase as OpenAIChat
from openai.types.completion_create_params import CompletionCreateParamsBase as OpenAICompletion
from openai.types.responses.response_create_params import (
    ResponseCreateParamsBase as OpenAIResponse,
)

from flexinfer.server.protocol.chat import ChatRequest
from flexinfer.server.protocol.completions import CompletionRequest
from flexinfer.server.protocol.messages import CountRequest, MessagesRequest
from flexinfer.server.protocol.others import TokenizeRequest
from flexinfer.server.protocol.refused import RefusedFields
from flexinfer.server.protocol.responses import ResponsesRequest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
SAYS = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": SAYS, "max_tokens": 2},
    COMPLETIONS: {"prompt": "hello", "max_tokens": 2},
    RESPONSES: {"input": "hello", "max_output_tokens": 2},
    MESSAGES: {"messages": SAYS, "max_tokens": 2, "model": "tiny_chat"},
    "/v1/messages/count_tokens": {"messages": SAYS, "model": "tiny_chat"},
}
MODELS: dict[str, type[BaseModel]] = {
    CHAT: ChatRequest,
    COMPLETIONS: CompletionRequest,
    RESPONSES: ResponsesRequest,
    MESSAGES: MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
}
HINTS = {
    *("metadata", "store", "verbosity", "prediction", "safety_identifier", "service_tier"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "user", "speed"),
    "background_options",
    *("cache_control", "diagnostics", "user_profile_id", "workspace_id"),
    *("session_id", "request_id", "rid", "custom_labels", "ngram_corpus_id", "stream_interval"),
    *("routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank", "bootstrap_port"),
    *("routed_experts_prompt_start", "routed_experts_start_len"),
    *("return_token_offsets", "return_mm_kwargs"),
    *("cache_prompt", "n_discard", "n_cache_reuse", "id_slot", "xtc_threshold", "dry_base"),
    *("dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "dynatemp_exponent"),
    *("mirostat_tau", "mirostat_eta", "preserved_tokens", "backend_sampling"),
    *("parallel_tool_calls", "echo_reasoning"),
}
"""Names of requests, of owners and of caches; what says how fast, in what pieces or on which device
an answer is to come; how something is done that another field asks for, which is refused."""
OTHERS: dict[str, dict[str, set[str]]] = {
    "vLLM": {
        CHAT: {
            *("frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "max_tokens", "n"),
            *("max_completion_tokens", "presence_penalty", "response_format", "seed", "stop"),
            *("stream", "stream_options", "temperature", "top_p", "tools", "tool_choice"),
            *("reasoning_effort", "thinking_token_budget", "include_reasoning"),
            *("parallel_tool_calls", "user", "use_beam_search", "top_k", "min_p"),
            *("repetition_penalty", "watermarking", "length_penalty", "stop_token_ids"),
            *("include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens"),
            *("spaces_between_special_tokens", "truncate_prompt_tokens", "truncation_side"),
            *("prompt_logprobs", "logprob_token_ids", "allowed_token_ids", "bad_words", "echo"),
            *("add_generation_prompt", "continue_final_message", "add_special_tokens"),
            *("documents", "chat_template", "chat_template_kwargs", "media_io_kwargs"),
            *("mm_processor_kwargs", "structured_outputs", "priority", "request_id"),
            *("session_id", "return_tokens_as_token_ids", "return_token_ids", "cache_salt"),
            *("return_prompt_text", "routed_experts_prompt_start", "kv_transfer_params"),
            *("return_token_offsets", "return_mm_kwargs", "mm_payload"),
            *("ec_transfer_params", "vllm_xargs", "repetition_detection", "stream_interval"),
            *("return_token_offsets", "return_mm_kwargs"),
        },
        COMPLETIONS: {"prompt", "suffix", "prompt_embeds", "best_of", "guided_json"},
        RESPONSES: {
            *("background", "include", "instructions", "max_output_tokens", "max_tool_calls"),
            *("metadata", "previous_response_id", "prompt", "reasoning", "service_tier", "store"),
            *("text", "truncation", "prompt_cache_key", "enable_response_messages"),
            *("previous_input_messages", "previous_response", "vllm_xargs"),
        },
        MESSAGES: {"output_config", "stop_sequences", "system", "kv_transfer_params"},
    },
    "SGLang": {
        CHAT: {
            *("return_hidden_states", "return_routed_experts", "routed_experts_start_len"),
            *("return_cached_tokens_details", "return_prompt_token_ids", "return_meta_info"),
            *("reasoning_effort", "task", "regex", "ebnf", "stop_regex", "no_stop_trim"),
            *("lora_path", "session_id", "session_params", "separate_reasoning", "reasoning"),
            *("stream_reasoning", "max_dynamic_patch", "min_dynamic_patch", "images_config"),
            *("use_audio_in_video", "custom_logit_processor", "custom_params", "input_ids"),
            *("rid", "extra_key", "ngram_corpus_id", "bootstrap_host", "bootstrap_port"),
            *("bootstrap_room", "routed_dp_rank", "disagg_prefill_dp_rank"),
            *("data_parallel_rank", "custom_labels"),
        },
        COMPLETIONS: {"json_schema", "return_token_ids"},
    },
    "llama.cpp": {
        COMPLETIONS: {
            *("timings_per_token", "cache_prompt", "return_tokens", "return_progress"),
            *("n_predict", "n_indent", "n_keep", "n_discard", "n_cmpl", "n_cache_reuse"),
            *("t_max_predict_ms", "response_fields", "top_n_sigma", "xtc_probability"),
            *("xtc_threshold", "typical_p", "dynatemp_range", "dynatemp_exponent"),
            *("repeat_last_n", "repeat_penalty", "dry_multiplier", "dry_base"),
            *("dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
            *("mirostat", "mirostat_tau", "mirostat_eta", "n_probs", "min_keep", "samplers"),
            *("post_sampling_probs", "backend_sampling", "lora", "grammar", "json_schema"),
            *("grammar_lazy", "grammar_triggers", "preserved_tokens", "id_slot"),
            *("reasoning_format", "reasoning_in_content", "thinking_forced_open"),
        },
    },
}


def known(kind: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in kind.model_fields.items()}


@pytest.mark.parametrize("server", OTHERS)
@pytest.mark.parametrize("path", MODELS)
def test_no_field_of_another_server_is_unheard_of(server: str, path: str) -> None:
    """At whatever endpoint it is sent, but for those that only count tokens."""
    if path.endswith("count_tokens"):
        names = OTHERS[server].get(MESSAGES, set()) - {"stop_sequences"}
    else:
        names = set().union(*OTHERS[server].values())
    assert names - known(MODELS[path]) - HINTS == set()


@pytest.mark.parametrize(
    ("client", "path"),
    [
        (OpenAIChat, CHAT),
        (OpenAICompletion, COMPLETIONS),
        (OpenAIResponse, RESPONSES),
        (anthropic_types.message_create_params.MessageCreateParamsBase, MESSAGES),
        (anthropic_types.MessageCountTokensParams, "/v1/messages/count_tokens"),
    ],
)
def test_no_field_of_a_client_is_unheard_of(client: Any, path: str) -> None:
    assert set(typing.get_type_hints(client)) - known(MODELS[path]) - HINTS == set()


@pytest.mark.parametrize("path", MODELS)
def test_what_is_refused_is_refused_everywhere(path: str) -> None:
    for name in RefusedFields.model_fields:
        with pytest.raises(ValidationError) as caught:
            MODELS[path].model_validate(BODIES[path] | {name: ["x"]})
        assert [error["loc"] for error in caught.value.errors()] == [(name,)]
        MODELS[path].model_validate(BODIES[path] | {name: None})


@pytest.mark.parametrize("path", MODELS)
@pytest.mark.parametrize(
    "fields",
    [
        {"thinking_token_budget": 0},
        {"typical_p": 0.5},
        {"repeat_last_n": 64},
        {"n_cmpl": 2},
        {"reasoning_format": "none"},
        {"enable_thinking": False},
        {"separate_reasoning": False},
        {"extra_key": "tenant"},
        {"input_ids": [5]},
        {"bootstrap_room": 0},
        {"moderation": {"model": "omni"}},
        {"inference_geo": "eu"},
        {"previous_input_messages": SAYS},
    ],
)
def test_it_is_400_by_its_name(path: str, fields: dict[str, Any], http: httpx.Client) -> None:
    (name,) = fields
    answer = http.post(path, json=BODIES[path] | fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error.get("param", name) == name
    assert name in error["message"] or error["param"] == name


@pytest.mark.parametrize("path", MODELS)
def test_what_leaves_all_as_it_is_is_let_through(path: str, http: httpx.Client) -> None:
    numbers = {"thinking_token_budget": -1, "typical_p": 1.0, "repeat_last_n": -1, "n_cmpl": 1}
    others = {"reasoning_format": "auto", "separate_reasoning": True, "mirostat": 0, "lora": []}
    body = BODIES[path] | numbers | others | {"modalities": ["text"], "t_max_predict_ms": -1}
    assert http.post(path, json=body).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": [*SAYS, {"role": "assistant", "refusal": "no"}]}, "refusal"),
        (CHAT, {"messages": [*SAYS, {"role": "assistant", "audio": {"id": "x"}}]}, "audio"),
        (CHAT, {"messages": [{**SAYS[0], "function_call": {"name": "f"}}]}, "function_call"),
        (CHAT, {"messages": [{**SAYS[0], "tools": [{}]}]}, "tools"),
        (
            CHAT,
            {"structured_outputs": {"json": {}, "whitespace_pattern": " *"}},
            "whitespace_pattern",
        ),
        (
            COMPLETIONS,
            {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
            "disable_additional_properties",
        ),
        ("/tokenize", {"messages": SAYS, "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"messages": SAYS, "documents": [{"text": "x"}]}, "documents"),
        (CHAT, {"documents": [{"text": "x"}]}, "documents"),
        (COMPLETIONS, {"documents": [{"text": "x"}]}, "documents"),
        (RESPONSES, {"documents": [{"text": "x"}]}, "documents"),
    ],
)
def test_within_messages_and_structures_too(
    path: str, fields: dict[str, Any], param: str, http: httpx.Client
) -> None:
    answer = http.post(path, json=BODIES.get(path, {}) | fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].endswith(param)


def test_tokenize_knows_the_fields_of_vllms() -> None:
    names = {"prompt", "messages", "tools", "add_special_tokens", "return_token_strs"}
    names |= {"add_generation_prompt", "continue_final_message", "chat_template"}
    names |= {"chat_template_kwargs"}
    assert names <= set(TokenizeRequest.model_fields)


# Anthropic's Messages take what says how tokens are chosen, too.


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "[0-9]{4}"},
        {"structured_outputs": {"choice": ["one"]}},
        {"logit_bias": {"70": 100}, "ignore_eos": True},
        {"temperature": 1.0, "seed": 5, "regex": "[ab]{12}", "presence_penalty": 2.0},
        {"stop_token_ids": [5], "include_stop_str_in_output": True, "logit_bias": {"5": 100}},
        {"truncate_prompt_tokens": 4},
        {"allowed_token_ids": [70, 71, 72]},
        {"bad_words": ["sorry"]},
    ],
)
def test_messages_honour_what_chats_honour(fields: dict[str, Any], http: httpx.Client) -> None:
    story = {"messages": [{"role": "user", "content": "Tell me a story."}], "temperature": 0}
    body = BODIES[MESSAGES] | story | {"max_tokens": 12}
    plain, chat, message = (
        http.post(path, json=body | given).json()
        for path, given in ((CHAT, {}), (CHAT, fields), (MESSAGES, fields))
    )
    text = "".join(block["text"] for block in message["content"])
    assert text == chat["choices"][0]["message"]["content"]
    assert text != plain["choices"][0]["message"]["content"]


def test_arguments_of_the_template_are_handed_on(http: httpx.Client) -> None:
    fields = {"chat_template_kwargs": {"messages": []}}
    assert http.post(MESSAGES, json=BODIES[MESSAGES] | fields).status_code == 400
    fields = {"chat_template_kwargs": {"anything": True}}
    assert http.post(MESSAGES, json=BODIES[MESSAGES] | fields).status_code == 200
