"""RootPathMiddleware: a server that a proxy shows below a path, such as https://example.org/llm/.

Some proxies cut that path off, some leave it: what is behind it here is the same either way.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPathMiddleware:
    """Cuts the path off that begins requests. It must see them first: keys hang on paths."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        """`root_path`: of `checked_root_path`, not empty."""
        self._app = app
        self._root = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path == self._root or path.startswith(f"{self._root}/"):
            scope = {**scope, "path": path[len(self._root) :] or "/"}
        await self._app(scope, receive, send)


def checked_root_path(given: str) -> str:
    """Without a "/" at its end; "" for none. Raises ValueError."""
    path = given.rstrip("/")
    if path and (not path.startswith("/") or path.startswith("//") or set("?#") & set(path)):
        raise ValueError(f"root_path must be a path such as /llm, got {given!r}")
    if path == "/v1" or path.startswith("/v1/"):
        raise ValueError(
            f"root_path {given!r} is where this server has its own paths: have the proxy leave "
            "/v1 in requests, and leave root_path out"
        )
    return path
