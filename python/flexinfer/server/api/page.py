"""The web page at `/`: plain files of `static/`, nothing from other hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from starlette.responses import Response

STATIC = Path(__file__).parents[1] / "static"
HEADERS = {
    # Only from this server. The map's widths and hues are inline styles.
    "Content-Security-Policy": (
        "default-src 'self'; style-src 'self' 'unsafe-inline'; object-src 'none'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class PageFiles(StaticFiles):
    """Static files with the page's headers: a browser asks whether they changed, each time."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(HEADERS)
        return response


def mount_page(app: FastAPI) -> None:
    """Serve the page at `/` and its files under `/static`."""

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    def page() -> FileResponse:
        return FileResponse(STATIC / "index.html", headers=HEADERS)

    app.mount("/static", PageFiles(directory=STATIC), name="static")
