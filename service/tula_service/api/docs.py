"""`/openapi.json` and a page of routes at `/docs` that loads nothing from other hosts."""

from __future__ import annotations

import html
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse

from tula_service.api.scopes import OPEN
from tula_wire import Problem, SampleBatch, TelemetryChunk

router = APIRouter(tags=["operations"], include_in_schema=False)

_SCHEMAS = (Problem, SampleBatch, TelemetryChunk)
_REFERENCE = "#/components/schemas/{model}"


@router.get("/openapi.json")
def get_openapi_document(request: Request) -> dict[str, Any]:
    """The OpenAPI document of every route."""
    return document(request.app)


@router.get("/docs", response_class=HTMLResponse)
def get_docs(request: Request) -> HTMLResponse:
    """The routes as a table."""
    rows = []
    for path, operations in document(request.app)["paths"].items():
        for method, operation in operations.items():
            text = operation.get("description") or operation.get("summary", "")
            cells = (f"<code>{method.upper()}</code>", f"<code>{html.escape(path)}</code>", html.escape(text))
            rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return HTMLResponse(
        "<!doctype html><html lang=en><meta charset=utf-8><title>Tula API</title>"
        "<style>body{font:16px/1.5 system-ui;margin:2rem auto;max-width:70rem;padding:0 1rem}"
        "td{padding:.3rem 1rem .3rem 0;vertical-align:top}</style>"
        '<h1>Tula API</h1><p>Machine-readable: <a href="/openapi.json">openapi.json</a>.</p>'
        f"<table>{''.join(rows)}</table></html>"
    )


def document(app: FastAPI) -> dict[str, Any]:
    """The document, with schemas of problem documents and of bodies that FastAPI does not parse."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
        components = made.setdefault("components", {})
        schemas = components.setdefault("schemas", {})
        for model in _SCHEMAS:
            schema = model.model_json_schema(ref_template=_REFERENCE)
            schemas.update(schema.pop("$defs", {}))
            schemas[model.__name__] = schema
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        made["security"] = [{"token": []}]
        for path, operations in made["paths"].items():
            for method, operation in operations.items():
                operation["responses"].pop("422", None)
                if (method.upper(), path) in OPEN:
                    operation["security"] = []
        app.openapi_schema = made
    return app.openapi_schema
