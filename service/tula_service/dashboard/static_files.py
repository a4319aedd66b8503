"""Style sheet, scripts, the Vega bundle and the pages of the API's reference, served by this service."""

from __future__ import annotations

import functools
import hashlib
from importlib import resources
from typing import Final

from fastapi import APIRouter, Request, Response

from tula_service.dashboard import charts
from tula_service.errors import NotFound

router = APIRouter(include_in_schema=False)

_FILES: Final = {
    "app.css": "text/css; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "docs.js": "text/javascript; charset=utf-8",
    "forms.js": "text/javascript; charset=utf-8",
    "theme.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
_REFERENCE: Final = {
    "swagger-ui.css": "text/css; charset=utf-8",
    "swagger-ui-bundle.js": "text/javascript; charset=utf-8",
    "redoc.standalone.js": "text/javascript; charset=utf-8",
}
"""Files of the package fastapi-offline."""
_VEGA: Final = "vega.js"
_LOGO: Final = b"https://cdn.redoc.ly/redoc/logo-mini.svg"
"""ReDoc's image from another host: the content security policy refuses it, and ReDoc leaves out what is no image."""


@router.get("/static/{name}")
def get_static(name: str, request: Request) -> Response:
    """A file by its name in a fixed list, so that no path reaches the disk; revalidated by its ETag."""
    if name not in _FILES and name not in _REFERENCE and name != _VEGA:
        raise NotFound(f"There is no file {name!r}: see /docs for the routes.")
    body, media_type, etag = _file(name)
    headers = {"ETag": etag, "Cache-Control": "no-cache"}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return Response(body, media_type=media_type, headers=headers)


@functools.cache
def _file(name: str) -> tuple[bytes, str, str]:
    """Body, media type and ETag."""
    if name == _VEGA:
        body, kind = charts.javascript().encode(), _FILES["app.js"]
    elif name in _REFERENCE:
        body, kind = (resources.files("fastapi_offline") / "static" / name).read_bytes(), _REFERENCE[name]
        body = body.replace(_LOGO, b"data:,")
    else:
        body, kind = (resources.files("tula_service.dashboard") / "static" / name).read_bytes(), _FILES[name]
    return body, kind, f'"{hashlib.sha256(body).hexdigest()[:24]}"'
