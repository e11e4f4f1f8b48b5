"""HostMiddleware: answers only to names by which this server is meant to be called.

A foreign web page may have its own name resolved to 127.0.0.1 (DNS rebinding): the browser then
lets it read what a server there answers. Its requests give that name away as their Host.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from flexinfer.server.http.errors import APIError, error_response


class HostMiddleware:
    """Refuses requests for hosts that are neither this machine's loopback nor allowed."""

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        """`allowed`: names without a port; "*.example.org" is every name below example.org."""
        self._app = app
        self._allowed = frozenset(name.lower() for name in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            name = host_of(scope)
            if name is not None and not self._is_allowed(name):
                error = APIError(
                    403,
                    f"this server does not answer to the name {name!r}: start it with "
                    "--allowed-hosts NAME, or call it by localhost",
                    code="host_not_allowed",
                )
                await error_response(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_allowed(self, name: str) -> bool:
        parents = name.split(".")
        return (
            name in self._allowed
            or is_loopback(name)
            or any(f"*.{'.'.join(parents[i:])}" in self._allowed for i in range(1, len(parents)))
        )


def host_of(scope: Scope) -> str | None:
    """The name in the Host header, in small letters, without its port; None: there is none. Of
    several, which no client sends, all: that is a name of nobody."""
    hosts: list[str] = [
        value.decode("latin-1") for key, value in scope["headers"] if key == b"host"
    ]
    if len(hosts) != 1:
        return ", ".join(hosts) or None
    host = hosts[0].rpartition("@")[2].lower()
    return host[1 : host.find("]")] if host.startswith("[") else host.partition(":")[0]


def is_loopback(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
