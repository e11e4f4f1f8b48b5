"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}; Anthropic's endpoints
have its own: {"type": "error", "error": {"type", "message"}}.

What callers did wrong is 4xx and says what, why and what to do; what failed here is 5xx.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from flexinfer.errors import EngineDeadError, EngineError, OutOfMemoryError, RequestError
from flexinfer.runtime.panics import panics_as_errors

logger = logging.getLogger(__name__)

TYPE_OF_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
PLAIN_TYPES = frozenset({"str", "int", "float", "bool", "none"})
FIELD_NAME = re.compile(r"([a-z]+(?:_[a-z]+)+|n|seed|stop|temperature|logprobs)\b")
"""Of a request, at the head of a message. Words of one part are also plain words, so these are
only those that the engine checks."""
ANTHROPIC_PATH = "/v1/messages"
ANTHROPIC_TYPE_OF_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
CLIENT_CLOSED_REQUEST = 499
"""Never read: the client has disconnected."""


class APIError(HTTPException):
    """An answer that is an error; `param` names the field of the request that is wrong."""

    def __init__(
        self,
        status_code: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status_code, message, dict(headers or {}))
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        return error_body(self.status_code, self.detail, self.param, self.code)


def error_body(
    status_code: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The JSON of an error."""
    fallback = "invalid_request_error" if status_code < 500 else "server_error"
    kind = TYPE_OF_STATUS.get(status_code, fallback)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def shaped_body(error: APIError, path: str) -> dict[str, Any]:
    """The JSON of an error, as the clients of this endpoint know it."""
    if not path.startswith(ANTHROPIC_PATH):
        return error.body
    fallback = "invalid_request_error" if error.status_code < 500 else "api_error"
    kind = ANTHROPIC_TYPE_OF_STATUS.get(error.status_code, fallback)
    is_too_long = error.code == "context_length_exceeded"  # clients look for Anthropic's words
    message = f"prompt is too long: {error.detail}" if is_too_long else error.detail
    return {"type": "error", "error": {"type": kind, "message": message}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> APIError:
    return APIError(400, message, param=param, code=code)


def not_json(why: str) -> APIError:
    return bad_request(f"the body is not JSON: {why}", code="invalid_json")


def invalid_field(error: ValueError) -> APIError:
    """What the engine refuses; its messages begin with the name of the field that is wrong."""
    name = FIELD_NAME.match(str(error))
    return bad_request(str(error), name[1] if name else None)


def shutting_down() -> APIError:
    return APIError(
        503,
        "the server is shutting down: try another one, or try again later",
        code="shutting_down",
        headers={"Retry-After": "5"},
    )


def wrong_content_type(kind: str) -> APIError:
    """Most often that of `curl -d` by itself, which says that it sends a form."""
    return bad_request(
        f"the body has the content type {kind!r}: send JSON, with the header "
        "'Content-Type: application/json'",
        code="unsupported_content_type",
    )


def as_api_error(error: BaseException) -> APIError:
    """What an exception from below is to a caller."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, EngineDeadError):
        return APIError(500, f"{error}; the server is going down", code="engine_dead")
    if isinstance(error, EngineError):
        return APIError(500, f"{error}; other requests go on", code="engine_error")
    if isinstance(error, RequestError):
        return invalid_field(error)
    if isinstance(error, OutOfMemoryError):
        return APIError(503, str(error), code="out_of_memory", headers={"Retry-After": "1"})
    return APIError(500, "internal error; the server's log has the details", code="internal_error")


def error_response(error: APIError, path: str) -> JSONResponse:
    return JSONResponse(shaped_body(error, path), error.status_code, dict(error.headers or {}))


def validation_error(error: RequestValidationError) -> APIError:
    """The first thing that is wrong with a request, by the name of its field. A field that is not
    there says less than one that is: it may have got another endpoint's name."""
    first = _most_telling(sorted(error.errors(), key=_is_absent))
    if first["type"] == "json_invalid":
        return not_json(first["ctx"]["error"])
    param = ".".join(_field_path(first["loc"])) or None
    message = first["msg"].removeprefix("Value error, ")
    paths = {tuple(_field_path(one["loc"])) for one in error.errors()}
    # "A text or a list of ..." has a fault of its own for each of the two.
    more = sum(not any(path == one[: len(path)] != one for one in paths) for path in paths) - 1
    where = f"{param}: " if param else ""
    return bad_request(f"{where}{message}" + (f" (and {more} more)" if more else ""), param)


def _is_absent(error: Any) -> bool:
    return error["type"] == "missing" and len(error["loc"]) == 2


def _most_telling(errors: Sequence[Any]) -> Any:
    """The first error, or what lies deeper in the same field: of "a text or a list of ..." it is
    the fault in the list, if that is what was given."""
    path = _field_path(errors[0]["loc"])
    same = [one for one in errors if _field_path(one["loc"])[: len(path)] == path]
    return max(same, key=lambda one: (len(one["loc"]), not one["type"].endswith("_type")))


def _field_path(location: Sequence[int | str]) -> list[str]:
    """The names of fields and numbers of entries, without the types that a union consists of."""
    path: list[str] = []
    for part in location[1:]:  # the first says body, query, path or header
        if isinstance(part, str) and (part in PLAIN_TYPES or part[:1].isupper()):
            break
        if isinstance(part, int) or part.isidentifier():
            path.append(str(part))
    return path


def _unrouted(request: Request, status: int) -> str | None:
    """What to say where no route matches; None: one did."""
    path = request.url.path[:256]
    if status == 404:
        return f"there is no {path} here: GET /docs names all endpoints"
    if status == 405:
        return f"{path} does not take {request.method}: GET /docs names all endpoints"
    return None


class PanicMiddleware:
    """Makes errors of panics: no handler is asked about a BaseException."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with panics_as_errors:
            await self._app(scope, receive, send)


def install_error_handlers(app: FastAPI) -> None:
    """Have every error of the app answered in its endpoint's shape."""

    async def on_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        if not isinstance(error, APIError):
            detail = _unrouted(request, error.status_code) or str(error.detail)
            error = APIError(error.status_code, detail, headers=error.headers)
        return error_response(error, request.url.path)

    async def on_invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        kind = request.headers.get("content-type", "none")
        is_of_body = any(one["loc"][0] == "body" for one in error.errors())
        if is_of_body and request.method == "POST" and "json" not in kind.lower():
            return error_response(wrong_content_type(kind), request.url.path)
        return error_response(validation_error(error), request.url.path)

    async def on_known(request: Request, error: Exception) -> JSONResponse:
        return error_response(as_api_error(error), request.url.path)

    async def on_unknown(request: Request, error: Exception) -> JSONResponse:
        logger.error("unexpected %s", type(error).__name__, exc_info=error)
        response = error_response(as_api_error(error), request.url.path)
        response.headers["Connection"] = "close"  # starlette raises it again, and uvicorn hangs up
        return response

    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_invalid)
    for known in (EngineError, RequestError, OutOfMemoryError):
        app.add_exception_handler(known, on_known)
    app.add_exception_handler(Exception, on_unknown)
    app.add_middleware(PanicMiddleware)
