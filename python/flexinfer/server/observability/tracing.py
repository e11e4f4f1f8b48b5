"""RequestTracer: one OpenTelemetry span per request of the engine, sent to an OTLP collector.

Off unless `--otlp-traces-endpoint` is given: then neither the SDK nor the exporter is imported,
and no call is made. Span and attribute names are those of vLLM's tracing, so that its dashboards
work; what only vTensors have is called `flexinfer.*`. The usual OTEL_... variables hold (service
name, sampler, batches).
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from flexinfer.outputs import RequestMetrics, RequestOutput
from flexinfer.sampling.params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from opentelemetry.trace import Span

SPAN_NAME = "llm_request"
PROTOCOL = "http/protobuf"
TRACE_HEADERS = ("traceparent", "tracestate")
"""W3C Trace Context: where a caller's span is named."""

Result = TypeVar("Result")


def check_endpoint(endpoint: str) -> None:
    """Raises ValueError for what is not a collector's URL, or without OpenTelemetry."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            f"the OTLP endpoint must be a URL such as http://localhost:4318/v1/traces, "
            f"got {endpoint!r}"
        )
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = os.environ.get(name, PROTOCOL)
        if protocol != PROTOCOL:
            raise ValueError(
                f"{name} is {protocol!r}, but traces are sent by {PROTOCOL!r} only: unset it, and "
                f"give the collector's HTTP port (4318, not 4317)"
            )
    if not _is_installed():
        raise ValueError(
            "traces need OpenTelemetry, which is not installed: pip install 'flexinfer[otel]'"
        )


def _is_installed() -> bool:
    try:
        return all(
            find_spec(name) is not None
            for name in ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")
        )
    except ModuleNotFoundError:  # not even the parent package
        return False


class RequestTracer:
    """Makes spans and sends them in batches, in a thread of its own."""

    def __init__(self, endpoint: str, model: str) -> None:
        """Raises ValueError as `check_endpoint` does."""
        check_endpoint(endpoint)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._model = model
        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "flexinfer"}
        self._provider = TracerProvider(resource=Resource.create(named))
        exporter = OTLPSpanExporter(endpoint=_with_path(endpoint))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("flexinfer.server", version("flexinfer"))

    def shutdown(self) -> None:
        """Send what is left. Blocks, seconds at most."""
        self._provider.shutdown()

    async def watch(
        self,
        outputs: AsyncGenerator[RequestOutput, None],
        request_id: str,
        params: SamplingParams,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The same outputs; their span ends with them, or when their reader goes."""
        last: RequestOutput | None = None
        reasons: dict[int, str] = {}
        unfinished = "abort"  # the client has disconnected
        with self._span(request_id, params) as span:
            try:
                async with aclosing(outputs):
                    async for last in outputs:
                        for one in last.outputs:
                            if one.finish_reason is not None:
                                reasons[one.index] = one.finish_reason
                            if one.finish_reason == "error":
                                _set_failed(span, str(one.stop_reason))
                        yield last
            except Exception as error:
                unfinished = "error"
                _set_failed(span, str(error), error)
                raise
            finally:
                if last is not None:
                    span.set_attributes(_attributes_of(last))
                found = [reasons[index] for index in sorted(reasons)] or [unfinished]
                span.set_attribute("gen_ai.response.finish_reasons", found)

    async def watch_beams(
        self, search: Awaitable[Result], request_id: str, params: BeamSearchParams
    ) -> Result:
        """The result of a beam search, which has a span without the engine's times."""
        started_s = time.monotonic()
        with self._span(request_id, params) as span:
            try:
                return await search
            except Exception as error:
                _set_failed(span, str(error), error)
                raise
            finally:
                span.set_attribute("gen_ai.latency.e2e", time.monotonic() - started_s)

    def _span(self, request_id: str, params: SamplingParams | BeamSearchParams) -> _Ended:
        attributes = {
            "gen_ai.request.id": request_id,
            "gen_ai.response.model": self._model,
            **_attributes_asked(params),
        }
        from opentelemetry.trace import SpanKind

        return _Ended(
            self._tracer.start_span(SPAN_NAME, kind=SpanKind.SERVER, attributes=attributes)
        )


class _Ended:
    """A span that ends with the `with`; unlike OpenTelemetry's own it is not made the current one,
    which an async generator could not undo in the context of another task."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def __enter__(self) -> Span:
        return self._span

    def __exit__(self, *_: object) -> None:
        self._span.end()


class TraceContextMiddleware:
    """Spans made while a request is answered become children of the caller's `traceparent`."""

    def __init__(self, app: ASGIApp) -> None:
        from opentelemetry import context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._app = app
        self._context = context
        self._extract = TraceContextTextMapPropagator().extract

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = {name: headers[name] for name in TRACE_HEADERS if name in headers}
        token = self._context.attach(self._extract(given))
        try:
            await self._app(scope, receive, send)
        finally:
            self._context.detach(token)


def _with_path(endpoint: str) -> str:
    """A bare host gets the path that OTLP over HTTP has for traces."""
    bare = urlsplit(endpoint).path in ("", "/")
    return endpoint.rstrip("/") + "/v1/traces" if bare else endpoint


def _set_failed(span: Span, text: str, error: Exception | None = None) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_status(Status(StatusCode.ERROR, text))
    if error is not None:
        span.record_exception(error)


def _attributes_asked(params: SamplingParams | BeamSearchParams) -> dict[str, Any]:
    """What the caller asked for."""
    asked: dict[str, float | None]
    if isinstance(params, BeamSearchParams):
        asked = {"n": params.beam_width, "max_tokens": params.max_tokens}
    else:
        asked = {
            "n": params.n,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
        }
    return {f"gen_ai.request.{name}": value for name, value in asked.items() if value is not None}


def _attributes_of(output: RequestOutput) -> dict[str, Any]:
    """What came of it: tokens, seconds, and memory. What did not happen is left out."""
    metrics = output.metrics
    found = {
        "gen_ai.usage.prompt_tokens": len(output.prompt_token_ids),
        "gen_ai.usage.completion_tokens": metrics.num_generated_tokens,
        "flexinfer.cached_tokens": output.num_cached_tokens,
        "flexinfer.num_preemptions": metrics.num_preemptions,
        "flexinfer.chunks_aliased": metrics.chunks_aliased,
        "flexinfer.chunks_copied": metrics.chunks_copied,
        **{f"gen_ai.latency.{name}": value for name, value in _latencies(metrics).items()},
    }
    return {name: value for name, value in found.items() if value is not None}


def _latencies(metrics: RequestMetrics) -> dict[str, float | None]:
    """Seconds."""
    scheduled, first = metrics.first_scheduled_time, metrics.first_token_time
    last = metrics.last_token_time
    return {
        "time_in_queue": _between(metrics.arrival_time, scheduled),
        "time_to_first_token": _between(metrics.arrival_time, first),
        "time_in_model_prefill": _between(scheduled, first),
        "time_in_model_decode": _between(first, last),
        "time_in_model_inference": _between(scheduled, last),
        "e2e": _between(metrics.arrival_time, metrics.finished_time or time.monotonic()),
    }


def _between(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else end_s - start_s
