"""What a library in Rust raises when it panics is answered as other unexpected errors are."""

from __future__ import annotations

import asyncio

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from flexinfer.server.http.errors import PanicMiddleware, install_error_handlers


class PanicException(BaseException):
    """As pyo3 makes one for each library."""


def test_a_panic_has_the_shape_of_other_errors() -> None:
    app = FastAPI()
    install_error_handlers(app)

    @app.get("/")
    async def panic() -> None:
        raise PanicException("index out of bounds")

    answer = TestClient(app, raise_server_exceptions=False).get("/")
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"


@pytest.mark.parametrize(
    "kind", [asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit, ValueError]
)
def test_what_is_no_panic_goes_on_as_it_is(kind: type[BaseException]) -> None:
    error = kind()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise error

    call = PanicMiddleware(app)({}, None, None)  # type: ignore[arg-type]
    with pytest.raises(kind) as caught:
        call.send(None)
    assert caught.value is error
