"""`GET /docs`: all endpoints and their fields as one page, made from the OpenAPI document.

No script and nothing from other hosts, which Swagger's page would need.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse

from flexinfer.server.api.page import HEADERS

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
summary { padding: .4rem 0; cursor: pointer; }
summary b { display: inline-block; min-width: 4.5rem; }
code { font: .9em ui-monospace, monospace; }
td { padding: .1rem 1rem .1rem 0; vertical-align: top; }
"""


router = APIRouter(include_in_schema=False)
"""Both in threads of their own: the document takes a second to make."""


@router.get("/docs")
def docs(request: Request) -> HTMLResponse:
    return HTMLResponse(_page(request.app.openapi()), headers=HEADERS)


@router.get("/openapi.json")
def openapi(request: Request) -> JSONResponse:
    return JSONResponse(request.app.openapi())


def _page(document: dict[str, Any]) -> str:
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    schemas = document["components"]["schemas"]
    endpoints = "\n".join(
        _endpoint(path, method, operation, schemas)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body><main><h1>{title}</h1>\n"
        "<p>Its endpoints and the fields that they take; the same for programs: "
        f'<a href="openapi.json">openapi.json</a>.</p>\n{endpoints}\n</main></body></html>'
    )


def _endpoint(path: str, method: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    said = escape(operation.get("description") or operation.get("summary", ""))
    rows = "".join(_rows(operation, schemas))
    return (
        f"<details><summary><b>{method.upper()}</b> <code>{escape(path)}</code></summary>"
        f"<p>{said}</p><table>{rows}</table></details>"
    )


def _rows(operation: dict[str, Any], schemas: dict[str, Any]) -> Iterator[str]:
    """A row for each parameter, and for each field of the body."""
    for one in operation.get("parameters", ()):
        yield _row(one["name"], f"in the {one['in']}, {_type(one['schema'])}")
    content = operation.get("requestBody", {}).get("content", {})
    body = content.get("application/json", {}).get("schema", {})
    for kind in (body, *body.get("anyOf", ())):
        schema = schemas.get(_name(kind), {})
        for name, field in schema.get("properties", {}).items():
            needed = ", needed" if name in schema.get("required", ()) else ""
            yield _row(name, _type(field) + needed)


def _row(name: str, said: str) -> str:
    return f"<tr><td><code>{escape(name)}</code></td><td>{escape(said)}</td></tr>"


def _name(schema: dict[str, Any]) -> str:
    return str(schema.get("$ref", "")).rpartition("/")[2]


def _type(schema: dict[str, Any]) -> str:
    """In words."""
    parts = [_type(one) for one in schema.get("anyOf", schema.get("oneOf", ()))]
    if parts:
        return " or ".join(part for part in dict.fromkeys(parts) if part != "null")
    if "enum" in schema:
        return " or ".join(map(repr, schema["enum"]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return _name(schema) or str(schema.get("type", "anything"))
