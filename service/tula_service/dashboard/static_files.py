"""Style sheet, scripts, the Vega bundle and the pages of the API's reference, served by this service."""

from __future__ import annotations

import functools
import hashlib
import threading
from importlib import resources
from typing import Final

from fastapi import APIRouter, Request, Response

from tula_service.dashboard.charts.render import javascript
from tula_service.errors import NotFound

router = APIRouter(include_in_schema=False)

_FILES: Final = dict.fromkeys(
    ("app.css", "app.js", "docs.js", "forms.js", "theme.js", "icon.svg"), "tula_service.dashboard"
) | dict.fromkeys(("swagger-ui.css", "swagger-ui-bundle.js", "redoc.standalone.js"), "fastapi_offline")
"""Names of files, each with the package in whose folder `static` it is."""
_VEGA: Final = "vega.js"
_TYPES: Final = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_ONCE: Final = threading.Lock()
"""Held while a file is made: the bundle takes a process a second, and many may ask a new service for it at once."""
_LOGO: Final = b"https://cdn.redoc.ly/redoc/logo-mini.svg"
"""ReDoc's image from another host: the content security policy refuses it, and ReDoc leaves out what is no image."""


@router.get("/static/{name}")
def get_static(name: str, request: Request) -> Response:
    """A file by its name in a fixed list, so that no path reaches the disk; revalidated by its ETag."""
    if name not in _FILES and name != _VEGA:
        raise NotFound(f"There is no file {name!r}: see /docs for the routes.")
    with _ONCE:
        body, etag = _file(name)
    headers = {"ETag": etag, "Cache-Control": "no-cache"}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return Response(body, media_type=_TYPES[name.rpartition(".")[2]], headers=headers)


@functools.cache
def _file(name: str) -> tuple[bytes, str]:
    """Body and ETag."""
    if name == _VEGA:
        body = javascript().encode()
    else:
        body = (resources.files(_FILES[name]) / "static" / name).read_bytes().replace(_LOGO, b"data:,")
    return body, f'"{hashlib.sha256(body).hexdigest()[:24]}"'
