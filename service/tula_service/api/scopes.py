"""Which scope may use which route: what is not listed is forbidden."""

from __future__ import annotations

from typing import Final

from starlette.routing import compile_path

from tula_service.usecases.access import PUBLIC
from tula_wire import routes

OPEN: Final = frozenset({("GET", routes.HEALTH), ("GET", routes.READY)})
"""Probes alone are answered without authentication; they reveal only yes or no."""
OPEN_FORMS: Final = frozenset({"/login", "/logout"})
"""Paths of forms that are read without authentication."""

AGENT_MAY: Final = frozenset(
    {
        ("GET", routes.RUN),
        ("PATCH", routes.RUN),
        ("POST", routes.RUN_SAMPLES),
        ("POST", routes.RUN_TELEMETRY),
        ("GET", routes.JOB_SCALING),
    }
)
PUBLIC_MAY: Final = frozenset({("GET", "/accuracy"), ("GET", "/accuracy/charts/{name}")})
"""What anyone may see of a service that only reads."""
_ADMIN_ONLY: Final = frozenset({("POST", routes.PROJECTS)})
_ABOUT_TOKENS: Final = frozenset({routes.TOKENS, "/admin"})
_INGEST: Final = frozenset({("POST", routes.RUN_SAMPLES), ("POST", routes.RUN_TELEMETRY)})
_AGENTS_PATHS: Final = [(method, compile_path(route)[0]) for method, route in AGENT_MAY]
_INGEST_PATHS: Final = [(method, compile_path(route)[0]) for method, route in _INGEST]


def required_scopes(method: str, route: str) -> frozenset[str]:
    """Scopes that may use the route: administrators and users, and `read` where nothing changes, unless listed here."""
    key = ("GET" if method == "HEAD" else method, route)
    readers = {"read"} if key[0] == "GET" and route not in _ABOUT_TOKENS else set()
    readers |= {PUBLIC.scope} if key in PUBLIC_MAY else set()
    if key in _ADMIN_ONLY:
        return frozenset({"admin"})
    if key in AGENT_MAY:
        return frozenset({"agent", "user", "admin", *readers})
    return frozenset({"user", "admin", *readers})


def is_of_agents(method: str, path: str) -> bool:
    """True for the paths of `AGENT_MAY`, whose requests have room and threads that no other request takes."""
    return any(method == known and pattern.match(path) for known, pattern in _AGENTS_PATHS)


def is_ingest(method: str, path: str) -> bool:
    """True for the two paths that agents call constantly: larger bodies, and a separate limit of requests."""
    return any(method == known and pattern.match(path) for known, pattern in _INGEST_PATHS)
