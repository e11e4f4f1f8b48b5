"""The OpenAI-compatible server over AsyncLLM: `create_app` makes it, `flexinfer serve` runs it.

Each file is one resource or one concern; `app` puts them together. Nothing here knows the core but
through the manager's public stats and snapshot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexinfer.server.app import create_app
    from flexinfer.server.settings import ServerSettings

__all__ = ["ServerSettings", "create_app"]


def __getattr__(name: str) -> Any:
    """FastAPI is imported when the first name is used."""
    if name == "create_app":
        from flexinfer.server.app import create_app

        return create_app
    if name == "ServerSettings":
        from flexinfer.server.settings import ServerSettings

        return ServerSettings
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
