"""Tests that `docs/wire.md` lists every route, and that its examples match a real service."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.service.api.wire_document import DOCUMENT, ROUTE, exchanges, shape, shortened
from tula_service.api.docs import document
from tula_service.app import create_app
from tula_service.settings import Settings
from tula_wire import routes

RESPONSE = re.compile(r"Response:\s`(\w+)`")
REFUSED = 1
"""Number of requests in the document that the service rejects, as examples of errors."""


def test_the_document_lists_every_route_and_names_the_model_that_it_answers(sqlite_url: str) -> None:
    app = create_app(Settings(database=sqlite_url))
    served = {
        (method.upper(), path): answer_model(operation)
        for path, operations in document(app)["paths"].items()
        for method, operation in operations.items()
        if path.startswith(("/v1/", "/healthz", "/readyz", "/metrics"))
    }
    app.state.services.store.close()
    text = DOCUMENT.read_text(encoding="utf-8")
    starts = [(found.start(), found.groups()) for found in ROUTE.finditer(text)]
    ends = [start for start, _ in starts[1:]] + [len(text)]
    documented = {}
    for (start, route), end in zip(starts, ends, strict=True):
        named = RESPONSE.search(text[start:end])
        documented[route] = None if named is None else named[1]
    assert documented == served


def answer_model(operation: dict[str, Any]) -> str | None:
    """Return the name of the model of a successful response, or None if it has no schema."""
    success = next(answer for status, answer in operation["responses"].items() if status.startswith("2"))
    reference = success.get("content", {}).get("application/json", {}).get("schema", {}).get("$ref")
    return None if reference is None else str(reference).rpartition("/")[2]


def test_every_path_that_both_sides_share_is_served() -> None:
    documented = {path for _, path in ROUTE.findall(DOCUMENT.read_text(encoding="utf-8"))}
    shared = {getattr(routes, name) for name in filter(str.isupper, vars(routes))}
    assert shared == documented


def test_every_request_is_answered_in_the_shape_that_is_printed() -> None:
    refused = 0
    for exchange in exchanges(DOCUMENT.read_text(encoding="utf-8")):
        first = exchange.request.splitlines()[0]
        refused += exchange.status >= 400
        assert exchange.status < 500, first
        if exchange.kind == "json":
            actual = shape(shortened(json.loads(exchange.actual)))
            assert shape(json.loads(exchange.documented)) == actual, first
        elif exchange.kind == "text":
            assert exchange.actual.splitlines()[0] == exchange.documented.splitlines()[0], first
    assert refused == REFUSED
