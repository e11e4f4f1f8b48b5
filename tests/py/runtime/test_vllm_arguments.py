"""Arguments of vLLM's that are no settings of ours: passed over, dropped, or refused by name."""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import Any

import pytest

from flexinfer.config import EngineConfig
from flexinfer.runtime.vllm_arguments import advice, translate
from flexinfer.runtime.vllm_names import (
    INSTEAD,
    OWN_NAMES,
    SAME_FIELDS,
    SAME_HERE,
    WITHOUT_EFFECT,
)
from helpers.vllm_snapshot import ARGUMENTS_ALONE, FLAGS, FLAGS_OF_MANY, SWITCHES

OF_SERVER = """
allow_credentials allowed_headers allowed_methods allowed_origins api_key
chat_template_content_format config default_chat_template_kwargs device_memory_utilization
enable_auto_tool_choice enable_force_include_usage exclude_tools_when_tool_choice_none host
lora_modules port root_path ssl_ca_certs ssl_cert_reqs ssl_certfile ssl_keyfile tool_call_parser uds
"""
"""Flags that no engine has; cli/test_serve_vllm_flags.py is about these."""
KNOWN = ("max_model_len", "cuda_graph_sizes", "seed")


def test_what_changes_no_answer_is_passed_over_and_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        found = translate({"seed": 1, "block_size": 16, "compilation_config": 3}, KNOWN)
    assert found == {"seed": 1}
    assert "passed over, for they change no answer: block_size, compilation_config" in caplog.text


@pytest.mark.parametrize(
    "given",
    [
        {"runner": "generate", "tokenizer_mode": "auto", "pipeline_parallel_size": 1},
        {
            "hf_config_path": None,
            "logits_processors": [],
            "cpu_offload_gb": 0.0,
            "worker_cls": "auto",
        },
        {"enable_prompt_embeds": False} | {"additional_config": {}, "reasoning_parser": ""},
        {"enable_return_routed_experts": False, "offload_group_size": 0, "profiler_config": None},
        {"structured_outputs_config": {"backend": "auto", "disable_any_whitespace": False}},
        {"structured_outputs_config": '{"backend": "guidance"}', "profiler_config": {}},
    ],
)
def test_what_asks_for_what_there_is_is_dropped(
    given: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert translate(given, KNOWN) == {}
    assert not caplog.records


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2 .*tensor_parallel_size"),
        (
            {"hf_config_path": "elsewhere"},
            "hf_config_path='elsewhere' is not served here: hf_overrides changes",
        ),
        ({"tokenizer_mode": "mistral"}, "tokenizer_mode='mistral' .*'auto'"),
        ({"enable_prompt_embeds": True}, "enable_prompt_embeds=True .*prompts are text"),
        (
            {"structured_outputs_config": {"backend": "xgrammar"}},
            "structured_outputs_config={'backend': 'xgrammar'} .*llguidance alone",
        ),
        (
            {"structured_outputs_config": {"backend": "auto", "disable_any_whitespace": True}},
            "structured_outputs_config={'disable_any_whitespace': True} is not served",
        ),
        ({"structured_outputs_config": "xgrammar"}, "structured_outputs_config='xgrammar' is not"),
    ],
)
def test_what_is_not_served_is_refused_with_what_to_do(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        translate(given, KNOWN)


@pytest.mark.parametrize(
    ("name", "says"),
    [("max_modl_len", "did you mean 'max_model_len'"), ("zzz", "no argument 'zzz' here: leave it")],
)
def test_a_name_that_nobody_knows_is_an_error(name: str, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        translate({name: None}, KNOWN)


def test_every_argument_of_vllms_is_known() -> None:
    """A TypeError says nothing of what to do instead."""
    ours = {field.name for field in fields(EngineConfig)} | {"chat_template", "trust_remote_code"}
    of_server = set(OF_SERVER.split())
    names = {*f"{SWITCHES} {FLAGS} {FLAGS_OF_MANY} {ARGUMENTS_ALONE}".split()} - of_server
    assert not names - ours - {*WITHOUT_EFFECT, *INSTEAD, *OWN_NAMES}


def test_what_has_another_name_here_is_taken() -> None:
    assert translate({"cudagraph_capture_sizes": [1, 2]}, KNOWN) == {"cuda_graph_sizes": [1, 2]}


def test_no_name_has_two_meanings() -> None:
    assert not WITHOUT_EFFECT & {*SAME_HERE, *INSTEAD, *OWN_NAMES}
    assert not OWN_NAMES.keys() & {*SAME_HERE, *INSTEAD}
    assert {*SAME_HERE, *SAME_FIELDS} <= {*INSTEAD}


def test_advice_is_for_what_vllm_has() -> None:
    assert advice("block_size") == "it changes no answer here: leave it out"
    assert advice("hf_config_path") == INSTEAD["hf_config_path"]
    assert advice("bogus") is None
