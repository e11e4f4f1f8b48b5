"""Fields that are known and not served: each is 400 by its name wherever a request has it.

What changes the answer, adds to it, or says with whom memory may be shared must not be passed over
in silence. Hints may be (`service_tier`, `store`, `rid`, `stream_interval`, ...), and so may names
that nobody here knows, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from pydantic.json_schema import SkipJsonSchema

from flexinfer.server.protocol.base import Model


def _refuse(value: Any) -> Any:
    """What says nothing, such as null, false or an empty list, is let through."""
    if value:
        raise ValueError("this field is not supported here")
    return value


def _refuse_unless(is_harmless: Callable[[Any], bool]) -> AfterValidator:
    def check(value: Any) -> Any:
        return value if value is None or is_harmless(value) else _refuse(value or True)

    return AfterValidator(check)


_UNSAID = Field(exclude=True)
"""No answer repeats it."""

Refused = Annotated[SkipJsonSchema[Any], _UNSAID, AfterValidator(_refuse)]
RefusedAny = Annotated[SkipJsonSchema[Any], _UNSAID, _refuse_unless(lambda _: False)]
"""Where zero or an empty value asks for something, too."""
RefusedFalse = Annotated[SkipJsonSchema[Any], _UNSAID, _refuse_unless(lambda value: value is True)]
RefusedBut1 = Annotated[SkipJsonSchema[Any], _UNSAID, _refuse_unless(lambda value: value == 1)]
RefusedSpeech = Annotated[
    SkipJsonSchema[Any], _UNSAID, _refuse_unless(lambda value: value == ["text"])
]
RefusedAbove0 = Annotated[
    SkipJsonSchema[Any],
    _UNSAID,
    _refuse_unless(lambda value: isinstance(value, (int, float)) and value <= 0),
]
"""Where llama.cpp turns something off by a number that is not 0."""
RefusedFrom0 = Annotated[
    SkipJsonSchema[Any],
    _UNSAID,
    _refuse_unless(lambda value: isinstance(value, (int, float)) and value < 0),
]
"""Where a negative number is what there is without the field."""
RefusedAuto = Annotated[SkipJsonSchema[Any], _UNSAID, _refuse_unless(lambda value: value == "auto")]
RefusedDisabled = Annotated[
    SkipJsonSchema[Any], _UNSAID, _refuse_unless(lambda value: value == "disabled")
]


class RefusedFields(Model):
    """By the project that has them; some of its others have them too."""

    # OpenAI
    functions: Refused = None
    function_call: Refused = None
    audio: Refused = None
    modalities: RefusedSpeech = None
    web_search_options: Refused = None
    moderation: Refused = None
    image: Refused = None
    access_programs: Refused = None
    # Anthropic
    mcp_servers: Refused = None
    context_management: Refused = None
    container: Refused = None
    compaction: Refused = None
    thread: Refused = None
    inference_geo: Refused = None
    # vLLM
    logits_processors: Refused = None
    guided_whitespace_pattern: Refused = None
    chat_template: Refused = None
    kv_transfer_params: Refused = None
    ec_transfer_params: Refused = None
    mm_processor_kwargs: Refused = None
    media_io_kwargs: Refused = None
    vllm_xargs: Refused = None
    thinking_token_budget: RefusedFrom0 = None
    return_tokens_as_token_ids: Refused = None
    return_prompt_text: Refused = None
    return_routed_experts: Refused = None
    return_token_offsets: Refused = None
    return_mm_kwargs: Refused = None
    mm_payload: Refused = None
    prompt_embeds: Refused = None
    logprob_token_ids: Refused = None
    repetition_detection: Refused = None
    watermarking: Refused = None
    spaces_between_special_tokens: RefusedFalse = None
    enable_response_messages: Refused = None
    previous_input_messages: Refused = None
    previous_response: Refused = None
    # SGLang
    stop_regex: Refused = None
    no_stop_trim: Refused = None
    min_new_tokens: Refused = None
    max_new_tokens: Refused = None
    custom_logit_processor: Refused = None
    custom_params: Refused = None
    lora_path: Refused = None
    session_params: Refused = None
    extra_key: Refused = None
    input_ids: Refused = None
    input_embeds: Refused = None
    task: Refused = None
    separate_reasoning: RefusedFalse = None
    stream_reasoning: RefusedFalse = None
    return_hidden_states: Refused = None
    return_prompt_token_ids: Refused = None
    return_cached_tokens_details: Refused = None
    return_meta_info: Refused = None
    images_config: Refused = None
    max_dynamic_patch: Refused = None
    min_dynamic_patch: Refused = None
    use_audio_in_video: Refused = None
    bootstrap_host: Refused = None
    bootstrap_room: RefusedAny = None
    # llama.cpp
    typical_p: RefusedBut1 = None
    mirostat: Refused = None
    dynatemp_range: Refused = None
    xtc_probability: Refused = None
    dry_multiplier: Refused = None
    top_n_sigma: RefusedAbove0 = None
    repeat_penalty: RefusedBut1 = None
    repeat_last_n: RefusedFrom0 = None
    samplers: Refused = None
    min_keep: Refused = None
    n_cmpl: RefusedBut1 = None
    n_predict: Refused = None
    n_keep: Refused = None
    n_probs: Refused = None
    n_indent: Refused = None
    post_sampling_probs: Refused = None
    t_max_predict_ms: RefusedAbove0 = None
    return_progress: Refused = None
    return_tokens: Refused = None
    response_fields: Refused = None
    timings_per_token: Refused = None
    grammar_lazy: Refused = None
    grammar_triggers: Refused = None
    reasoning_format: RefusedAuto = None
    reasoning_in_content: Refused = None
    thinking_forced_open: Refused = None
    image_data: Refused = None
    lora: Refused = None
    # Others
    enable_thinking: RefusedAny = None
