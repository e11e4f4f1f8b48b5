"""Who may ask what: API keys, the admin key, and the tenant that a key stands for.

A tenant's cache salt is derived from its key, so that tenants never share a prefix, and none can
find out by timing what another has asked. It is checked before the body is read.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from flexinfer.server.http.errors import APIError, error_response
from flexinfer.server.http.hosts import host_of, is_loopback

KEYED_PREFIXES = ("/v1/", "/tokenize", "/detokenize")
ENGINE_PATHS = ("/admin/", "/sleep", "/wake_up", "/is_sleeping")
"""Administration of one engine, or, where there are several, of all."""
ADMIN_PATHS = (*ENGINE_PATHS, "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
MEMORY_MAP_PATH = "/admin/memory"


class AuthMiddleware:
    """Refuses what a caller may not ask; puts `tenant` into the request's state."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], admin_api_key: str | None) -> None:
        self._app = app
        self._tenant_of = {_digest(key): _digest(key)[:16] for key in api_keys}
        self._admin = None if admin_api_key is None else _digest(admin_api_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] != "OPTIONS":
            try:
                scope.setdefault("state", {})["tenant"] = self._check(scope)
            except APIError as error:
                await error_response(error, path=scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> str:
        """The tenant; raises APIError. Paths that need no key have the tenant ""."""
        path = scope["path"]
        if path.startswith(ADMIN_PATHS):
            self._check_admin(scope)
            return ""
        if not path.startswith(KEYED_PREFIXES) or not self._tenant_of:
            return ""
        key = _bearer(scope) or _header(scope, b"x-api-key")
        if not key:
            raise _unauthorized("no API key: send the header 'Authorization: Bearer KEY'")
        tenant = _find(_digest(key), self._tenant_of)
        if tenant is None:
            raise _unauthorized("the API key is unknown", code="invalid_api_key")
        return tenant

    def _check_admin(self, scope: Scope) -> None:
        if self._admin is None:
            is_open = not self._tenant_of and _is_local(scope)
            if is_open and (scope["method"], scope["path"]) == ("GET", MEMORY_MAP_PATH):
                return
            raise APIError(
                403,
                "administration is off: start the server with --admin-api-key",
                code="admin_disabled",
            )
        key = _bearer(scope)
        if key is None:
            raise _unauthorized("no admin key: send the header 'Authorization: Bearer KEY'")
        if not hmac.compare_digest(_digest(key), self._admin):
            raise _unauthorized("the admin key is wrong", code="invalid_api_key")


def tenant_salt(tenant: str, cache_salt: str | None) -> str:
    """The engine's cache salt for what a tenant asks, with its own salt if it gives one."""
    if not tenant and not cache_salt:
        return ""
    return f"{tenant}:{cache_salt or ''}"


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _find(digest: str, tenants: dict[str, str]) -> str | None:
    """Compares with every key, in the same time whichever it is."""
    found = None
    for known, tenant in tenants.items():
        if hmac.compare_digest(digest, known):
            found = tenant
    return found


def _header(scope: Scope, name: bytes) -> str | None:
    value: Any = next((value for key, value in scope["headers"] if key == name), None)
    return None if value is None else value.decode("latin-1")


def _bearer(scope: Scope) -> str | None:
    kind, _, key = (_header(scope, b"authorization") or "").partition(" ")
    return key.strip() if kind.lower() == "bearer" and key.strip() else None


def _is_local(scope: Scope) -> bool:
    """Whether this machine asks, by its own name."""
    client = scope.get("client")
    return client is not None and is_loopback(client[0]) and is_loopback(host_of(scope) or "")


def _unauthorized(message: str, code: str | None = None) -> APIError:
    return APIError(401, message, code=code, headers={"WWW-Authenticate": "Bearer"})
