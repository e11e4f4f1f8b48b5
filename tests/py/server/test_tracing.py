"""Spans of requests, as a collector gets them over HTTP."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")

import httpx
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from flexinfer.async_llm import AsyncLLM
from flexinfer.server import settings as settings_module
from flexinfer.server.observability import tracing
from helpers.serving import MODEL, serving, settings
from helpers.waiting import until

HELLO = [{"role": "user", "content": "Hello! My name is Ada."}]
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"


class Collector:
    """An OTLP receiver: keeps what is posted to it."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, ExportTraceServiceRequest]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                request = ExportTraceServiceRequest.FromString(body)
                collector.requests.append((self.path, request))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()

    def spans(self) -> list[Span]:
        return [
            span
            for _, request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def wait_for(self, count: int) -> list[Span]:
        until(lambda: len(self.spans()) >= count, f"{count} spans")
        spans = self.spans()
        assert len(spans) == count
        return spans

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """A receiver without a proxy between, and spans that are sent soon."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    made = Collector()
    yield made
    made.close()


@pytest.fixture
def url(llm: AsyncLLM, collector: Collector) -> Iterator[str]:
    with serving(llm, settings(otlp_traces_endpoint=f"{collector.url}/v1/traces")) as url:
        yield url


def attributes(span: Span) -> dict[str, Any]:
    def value(one: Any) -> Any:
        kind = one.WhichOneof("value")
        if kind == "array_value":
            return [value(item) for item in one.array_value.values]
        return getattr(one, kind)

    return {one.key: value(one.value) for one in span.attributes}


def chat(url: str, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": HELLO, "temperature": 0, "max_tokens": 16, **fields}
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60)


def test_a_request_is_one_span_with_vllms_names(url: str, collector: Collector) -> None:
    answer = chat(url, top_p=0.5).json()
    (span,) = collector.wait_for(1)
    found = attributes(span)
    assert (span.name, span.kind) == ("llm_request", Span.SPAN_KIND_SERVER)
    assert found["gen_ai.usage.prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert found["gen_ai.usage.completion_tokens"] == answer["usage"]["completion_tokens"]
    assert found["gen_ai.response.model"] == MODEL
    assert found["gen_ai.response.finish_reasons"] == [answer["choices"][0]["finish_reason"]]
    asked = {name: found[f"gen_ai.request.{name}"] for name in ("n", "max_tokens", "top_p")}
    assert asked == {"n": 1, "max_tokens": 16, "top_p": 0.5}


def test_the_latencies_add_up(url: str, collector: Collector) -> None:
    chat(url, stream=True).raise_for_status()
    (span,) = collector.wait_for(1)
    found = attributes(span)
    took = {
        name: found[f"gen_ai.latency.{name}"]
        for name in (
            *("time_in_queue", "time_to_first_token", "e2e", "time_in_model_prefill"),
            *("time_in_model_decode", "time_in_model_inference"),
        )
    }
    assert all(value >= 0 for value in took.values())
    first = took["time_in_queue"] + took["time_in_model_prefill"]
    assert took["time_to_first_token"] == pytest.approx(first)
    both = took["time_in_model_prefill"] + took["time_in_model_decode"]
    assert took["time_in_model_inference"] == pytest.approx(both)
    assert took["time_to_first_token"] <= took["e2e"]
    assert took["e2e"] <= (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 + 0.001


def test_a_callers_traceparent_is_the_parent(url: str, collector: Collector) -> None:
    chat(url, {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}, stream=True).raise_for_status()
    (span,) = collector.wait_for(1)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)


def test_a_caller_that_does_not_sample_gets_no_span(url: str, collector: Collector) -> None:
    chat(url, {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}).raise_for_status()
    chat(url).raise_for_status()
    (span,) = collector.wait_for(1)
    assert span.trace_id.hex() != TRACE_ID
    assert span.parent_span_id == b""


def test_each_prompt_of_a_request_is_a_span(url: str, collector: Collector) -> None:
    body = {"model": MODEL, "prompt": ["Hello", "Good day"], "max_tokens": 4}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
    found = [attributes(span) for span in collector.wait_for(2)]
    tokens = sum(each["gen_ai.usage.completion_tokens"] for each in found)
    assert tokens == answer["usage"]["completion_tokens"]
    assert len({each["gen_ai.request.id"] for each in found}) == 2


def test_a_beam_search_is_a_span(url: str, collector: Collector) -> None:
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 4, "use_beam_search": True, "n": 2}
    httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()
    (span,) = collector.wait_for(1)
    assert attributes(span)["gen_ai.request.n"] == 2


def test_a_reader_that_goes_ends_its_span(url: str, collector: Collector) -> None:
    body = {"model": MODEL, "messages": HELLO, "stream": True}
    long = {**body, "min_tokens": 1500, "max_tokens": 1500}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=long, timeout=60) as response:
        next(response.iter_lines())
    (span,) = collector.wait_for(1)
    assert attributes(span)["gen_ai.response.finish_reasons"] == ["abort"]
    assert span.status.code == Status.STATUS_CODE_UNSET


def test_a_step_that_fails_is_a_failed_span(
    llm: AsyncLLM, url: str, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("the device is gone")

    engine = llm._thread.call(lambda engine: engine).result()
    monkeypatch.setattr(engine.runner, "forward", fail)
    assert chat(url).status_code == 500
    (span,) = collector.wait_for(1)
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert "the device is gone" in span.status.message
    assert attributes(span)["gen_ai.response.finish_reasons"] == ["error"]


def test_what_was_not_sent_yet_is_sent_at_the_end(
    llm: AsyncLLM, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    with serving(llm, settings(otlp_traces_endpoint=collector.url)) as url:
        chat(url).raise_for_status()
        assert collector.spans() == []
    assert len(collector.spans()) == 1
    ((path, request),) = collector.requests
    assert path == "/v1/traces", "a bare host gets the path of OTLP"
    (resource,) = request.resource_spans
    named = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert named["service.name"] == "flexinfer"


def test_answers_come_without_a_collector(llm: AsyncLLM) -> None:
    with serving(llm, settings(otlp_traces_endpoint="http://127.0.0.1:1")) as url:
        assert chat(url).status_code == 200


@pytest.mark.parametrize("endpoint", ["localhost:4317", "grpc://localhost:4317", "http://", ""])
def test_what_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="such as http://localhost:4318/v1/traces"):
        settings(otlp_traces_endpoint=endpoint)


def test_grpc_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    with pytest.raises(ValueError, match="HTTP port"):
        settings(otlp_traces_endpoint="http://localhost:4317")


def test_without_opentelemetry_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def find_nothing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(tracing, "find_spec", find_nothing)
    with pytest.raises(ValueError, match=r"pip install 'flexinfer\[otel\]'"):
        settings_module.ServerSettings(
            served_model_names=(MODEL,), otlp_traces_endpoint="http://localhost:4318"
        )


def test_a_server_without_traces_imports_neither_sdk_nor_exporter() -> None:
    code = (
        "import sys; from flexinfer.server.app import create_app\n"
        "mine = ('opentelemetry.sdk', 'opentelemetry.exporter')\n"  # the API is FastAPI's own
        "assert not [name for name in sys.modules if name.startswith(mine)]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
