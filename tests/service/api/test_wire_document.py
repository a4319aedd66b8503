"""`docs/wire.md` is complete and true."""

from __future__ import annotations

import json

from tests.service.api.wire_document import DOCUMENT, ROUTE, exchanges, shape, shortened
from tula_service.api.docs import document
from tula_service.app import create_app
from tula_service.settings import Settings
from tula_wire import routes

REFUSED = 1
"""Requests of the document that show what a refusal looks like."""


def test_every_route_of_the_service_has_its_place(sqlite_url: str) -> None:
    app = create_app(Settings(database=sqlite_url))
    served = {
        (method.upper(), path)
        for path, operations in document(app)["paths"].items()
        for method in operations
        if path.startswith(("/v1/", "/healthz", "/readyz", "/metrics"))
    }
    app.state.services.store.close()
    documented = set(ROUTE.findall(DOCUMENT.read_text(encoding="utf-8")))
    assert documented == served


def test_every_path_that_both_sides_share_is_served() -> None:
    documented = {path for _, path in ROUTE.findall(DOCUMENT.read_text(encoding="utf-8"))}
    shared = {getattr(routes, name) for name in routes.__all__ if name != "VERSION"}
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
