"""schemathesis: requests drawn from the OpenAPI document, right and wrong ones.

No answer is a 500, none differs from the document, and what breaks the schema is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

schemathesis = pytest.importorskip("schemathesis")

import jsonschema_rs
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from helpers.serving import make_llm, serving
from helpers.serving import settings as server_settings

# schemathesis imports most of itself at the first document, and pytest rewrites what it imports.
# Before any server runs: Python 3.11 cannot parse in two threads at once (python/cpython#106905).
OPERATION = {"get": {"responses": {"200": {"description": "Any."}}}}
DOCUMENT = {"openapi": "3.1.0", "info": {"title": "", "version": ""}, "paths": {"/": OPERATION}}
schemathesis.openapi.from_dict(DOCUMENT)["/"]["GET"].as_strategy()

ADMIN = {"Authorization": "Bearer admin"}
CHECKS = [
    not_a_server_error,
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
]


@pytest.fixture(scope="module")
def api() -> Iterator[Any]:
    """A server with a short context, so that any request ends soon."""
    llm = make_llm(max_model_len=96, max_num_seqs=4)
    try:
        with serving(llm, server_settings(admin_api_key="admin", max_n=4)) as url:
            # By default it gives up after 10 s, and a busy machine may take them.
            schema = schemathesis.openapi.from_url(f"{url}/openapi.json", timeout=300)
            # A body that is wrong may also be too large.
            rejection = schema.config.checks.negative_data_rejection
            rejection.expected_statuses = [*rejection.expected_statuses, "413"]
            # These would stop the server, starve it, or write files.
            yield schema.exclude(path_regex="^/admin/(sleep|budget|trace)")
    finally:
        llm.shutdown()


def check_document(api: Any, mode: GenerationMode, max_examples: int) -> int:
    """Returns how many requests were answered."""
    num_answered = 0
    for result in api.get_all_operations():
        operation = result.ok()

        @settings(max_examples=max_examples, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            nonlocal num_answered
            num_answered += 1
            case.call_and_validate(headers=ADMIN, checks=CHECKS)

        # An operation without parameters knows no wrong request.
        with contextlib.suppress(Unsatisfiable):
            check()
    return num_answered


@pytest.mark.parametrize("mode", GenerationMode)
def test_the_document_is_kept(api: Any, mode: GenerationMode) -> None:
    assert check_document(api, mode, 10) > 100


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_the_document_says_that_an_answer_may_be_a_stream(api: Any, path: str) -> None:
    answer = api[path]["POST"].definition.raw["responses"]["200"]
    assert set(answer["content"]) == {"application/json", "text/event-stream"}


TEXT = {"type": "text", "text": "x"}
ITEMS = [
    {"role": "user", "content": "x"},
    {"type": "message", "role": "user", "content": "x"},
    {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": "x"},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}]},
]
BLOCKS = [
    TEXT,
    {"type": "thinking", "thinking": "x"},
    {"type": "tool_use", "id": "a", "name": "f", "input": {}},
    {"type": "tool_result", "tool_use_id": "a", "content": [TEXT]},
]


@pytest.mark.parametrize(
    ("name", "body"),
    [("ResponsesRequest", {"model": "tiny_chat", "input": [item]}) for item in ITEMS]
    + [("MessageParam", {"role": "user", "content": [block]}) for block in BLOCKS],
)
def test_a_part_is_of_one_kind_by_the_document(api: Any, name: str, body: Any) -> None:
    document = {**api.raw_schema, "$ref": f"#/components/schemas/{name}"}
    jsonschema_rs.Draft202012Validator(document).validate(body)


@pytest.mark.slow
@pytest.mark.parametrize("mode", GenerationMode)
def test_the_document_is_kept_by_many_requests(api: Any, mode: GenerationMode) -> None:
    assert check_document(api, mode, 200) > 1000
