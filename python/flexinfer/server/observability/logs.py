"""Logs of the server: one line per request, with its id, as text or as JSON."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import uuid
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

from starlette.types import ASGIApp, Message, Receive, Scope, Send

access_logger = logging.getLogger("flexinfer.server.access")

LogFormat = Literal["text", "json"]
REQUEST_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)
QUIET_PATHS = frozenset({"/health", "/ping", "/ready", "/metrics", "/admin/memory"})
"""Polled all the time: logged only when they fail, or with --log-level debug."""

_request_id: ContextVar[str | None] = ContextVar("flexinfer_request_id", default=None)
_fields: ContextVar[dict[str, Any] | None] = ContextVar("flexinfer_log_fields", default=None)


def current_request_id() -> str:
    """The id of the HTTP request that is being answered."""
    return _request_id.get() or new_id()


def new_id() -> str:
    return uuid.uuid4().hex


def log_with_request(**fields: Any) -> None:
    """Let the line of the request that is being answered say this too."""
    known = _fields.get()
    if known is not None:
        known.update(fields)


class AccessLogMiddleware:
    """Gives each request an id, the caller's X-Request-Id if it is a sound one, and logs its end.

    What handlers give `log_with_request` is part of the line too.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _given_id(scope) or new_id()
        token = _request_id.set(request_id)
        scope.setdefault("state", {})
        fields: dict[str, Any] = {}
        fields_token = _fields.set(fields)
        start_s = time.perf_counter()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message.setdefault("headers", []).append((b"x-request-id", request_id.encode()))
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            seconds = time.perf_counter() - start_s
            _log_access(scope, status, {"seconds": round(seconds, 4), **fields})
            _request_id.reset(token)
            _fields.reset(fields_token)


def _given_id(scope: Scope) -> str | None:
    given = next((value for key, value in scope["headers"] if key == b"x-request-id"), b"")
    text: str = given.decode("latin-1")
    return text if REQUEST_ID.fullmatch(text) else None


def _log_access(scope: Scope, status: int, fields: dict[str, Any]) -> None:
    is_quiet = scope["path"] in QUIET_PATHS and status < 400
    level = logging.DEBUG if is_quiet else logging.INFO
    if not access_logger.isEnabledFor(level):
        return
    tenant = scope["state"].get("tenant")
    known = {"method": scope["method"], "path": scope["path"], "status": status}
    if tenant:
        known["tenant"] = tenant
    words = (scope["method"], scope["path"], status)
    access_logger.log(level, "%s %s %d", *words, extra={"fields": known | fields})


class TextFormatter(logging.Formatter):
    """`2026-11-21 14:00:00 INFO server.access [id] GET /health 200 seconds=0.001`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s", "%Y-%m-%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        request_id = _request_id.get()
        line = super().format(record)
        fields = getattr(record, "fields", {})
        shown = [f"{k}={v}" for k, v in fields.items() if k not in ("method", "path", "status")]
        if request_id is not None:
            shown.append(f"request_id={request_id}")
        return _one_line(" ".join([line, *shown])) if not record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, request_id, and further fields."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": when.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = _request_id.get()
        if request_id is not None:
            line["request_id"] = request_id
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def _one_line(text: str) -> str:
    """A path may hold anything, but must not add lines to the log."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def adopt_transformers() -> None:
    """Have transformers log through our handler: its own writes lines of another form."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()


def configure_logging(log_format: LogFormat, level: str) -> None:
    """Send all logs to stderr in this format. Raises ValueError for an unknown level."""
    number = logging.getLevelName(level.upper())
    if not isinstance(number, int):
        raise ValueError(f"log level must be debug, info, warning or error, got {level!r}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(number, logging.WARNING))
    for name in ("flexinfer", "uvicorn.error"):
        logging.getLogger(name).setLevel(number)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = name != "uvicorn.access"
