"""Endpoint: a server that speaks OpenAI's HTTP interface, as the commands with --url use it.

Built on httpx. Not thread-safe.
"""

from __future__ import annotations

import json
import os
import re
import ssl
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit

import httpx

DEFAULT_URL = "http://127.0.0.1:8000"
CONNECT_TIMEOUT_S = 5.0
UNAUTHORIZED = 401
LOOPBACK = {"127.0.0.1", "::1", "localhost"}


class EndpointError(ValueError):
    """The server cannot be reached, or refuses; says what was asked, and why it failed."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class KeySource:
    """Where the commands' users say a key."""

    option: str
    variable: str

    def advice(self, refusal: str, *, was_given: bool) -> str:
        """What a server's 401 means here: it speaks of headers to those without a key."""
        if was_given:
            return f"{refusal}; check {self.option}, and {self.variable} in the environment"
        return f"it was given no key; pass {self.option} KEY, or set {self.variable}"


USERS_KEY = KeySource("--api-key", "FLEXINFER_API_KEY")
ADMIN_KEY = KeySource("--admin-api-key", "FLEXINFER_ADMIN_API_KEY")


class Endpoint:
    """`url`: of the server, with or without /v1; `source`: where `api_key` comes from."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        timeout_s: float = 30.0,
        source: KeySource = USERS_KEY,
    ) -> None:
        self.url = _base_url(url)
        self._source, self._has_key = source, bool(api_key)
        is_local = urlsplit(self.url).hostname in LOOPBACK
        self._client = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
            trust_env=not is_local,  # a proxy does not know this machine's loopback
            verify=_trusted(),
        )
        self.replica: str | None = None
        """Who has given the last stream, where several serve."""

    def get_text(self, path: str) -> str:
        """Raises EndpointError."""
        try:
            response = self._client.get(path)
        except httpx.HTTPError as error:
            raise self._unreachable(path, error) from error
        self._check(path, response)
        text: str = response.text
        return text

    def get_json(self, path: str) -> Any:
        """Raises EndpointError."""
        text = self.get_text(path)
        try:
            return json.loads(text)
        except ValueError as error:
            raise EndpointError(f"GET {self.url}{path}: not JSON: {text[:80]!r}") from error

    def first_model(self) -> str:
        """Name of the first model that is served. Raises EndpointError."""
        try:
            name: str = self.get_json("/v1/models")["data"][0]["id"]
        except (KeyError, IndexError, TypeError) as error:
            raise EndpointError(f"{self.url}/v1/models names no model") from error
        return name

    def post_stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Server-sent events as they come, without the closing [DONE]. Raises EndpointError.

        Closing the iterator early closes the connection, which ends the request at the server.
        """
        try:
            with self._client.stream("POST", path, json=body) as response:
                if response.is_error:
                    response.read()
                self._check(path, response)
                self.replica = response.headers.get("x-replica")
                for line in response.iter_lines():
                    if not line.startswith("data:"):
                        continue
                    data = line.removeprefix("data:").strip()
                    if data == "[DONE]":
                        return
                    yield self._event(path, data)
        except httpx.HTTPError as error:
            raise self._unreachable(path, error) from error

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _event(self, path: str, data: str) -> dict[str, Any]:
        try:
            event: dict[str, Any] = json.loads(data)
        except ValueError as error:
            raise EndpointError(f"{self.url}{path}: not JSON: {data[:80]!r}") from error
        if "error" in event:
            raise EndpointError(f"{self.url}{path}: {_message(event)}")
        return event

    def _check(self, path: str, response: Any) -> None:
        if response.is_success:
            return
        try:
            message = _message(response.json())
        except ValueError:
            message = f"{response.reason_phrase or 'no reason'}; is this a flexinfer server?"
        status: int = response.status_code
        if status == UNAUTHORIZED:
            message = self._source.advice(message, was_given=self._has_key)
        raise EndpointError(f"{self.url}{path} answers {status}: {message}", status)

    def _unreachable(self, path: str, error: Exception) -> EndpointError:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            return EndpointError(
                f"{self.url}: its certificate is not trusted here ({_certificate_fault(error)}): "
                "for one of your own authority set SSL_CERT_FILE=CA.pem"
            )
        why = re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__
        return EndpointError(
            f"no answer from {self.url}{path}: {why}; is a server running there? "
            "Start one with `flexinfer serve`, or name another with --url"
        )


def memory_path(replica: str | None) -> str:
    """Of the memory map: of this replica; None: of a server alone, or of anyone."""
    return (
        "/admin/memory" if replica is None else f"/admin/memory?{urlencode({'replica': replica})}"
    )


def _base_url(url: str) -> str:
    url = url if "://" in url else f"http://{url}"
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"--url is like http://HOST:PORT, got {url!r}")
    return url.rstrip("/").removesuffix("/v1")


def _message(body: Any) -> str:
    """What an error in OpenAI's shape says."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _trusted() -> ssl.SSLContext | bool:
    """Whose certificates are believed: SSL_CERT_FILE's, which `trust_env` may have turned off."""
    file = os.environ.get("SSL_CERT_FILE")
    return True if file is None else ssl.create_default_context(cafile=file)


def _certificate_fault(error: Exception) -> str:
    """The part of OpenSSL's message that says what is wrong."""
    return str(error).partition("certificate verify failed: ")[2].partition(" (_ssl")[0] or str(
        error
    )
