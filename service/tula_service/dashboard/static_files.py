"""Serves style sheets, scripts, the Vega bundle and the files of the API reference from memory."""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from importlib import resources
from typing import Final

from fastapi import APIRouter, Request, Response

from tula_service.errors import NotFound

router = APIRouter(include_in_schema=False)

_FILES: Final = dict.fromkeys(
    ("app.css", "app.js", "docs.css", "docs.js", "forms.js", "theme.js", "vega.js", "icon.svg"),
    "tula_service.dashboard",
) | dict.fromkeys(("swagger-ui.css", "swagger-ui-bundle.js"), "fastapi_offline")
"""The package whose `static` folder contains each file, by file name; `hatch_build.py` builds `vega.js`."""
_TYPES: Final = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@router.get("/static/{name}")
async def get_static(name: str, request: Request) -> Response:
    """Return a file with its ETag. Only names in a fixed list are accepted, so no other file can be read."""
    if name not in _FILES:
        raise NotFound(f"There is no static file {name!r}: see /docs for the available routes.")
    body, etag = _file(name)
    headers = {"ETag": etag, "Cache-Control": "no-cache"}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return Response(body, media_type=_TYPES[name.rpartition(".")[2]], headers=headers)


@cache
def _file(name: str) -> tuple[bytes, str]:
    """Return a file's content and ETag. Raises NotFound in a checkout where the package was never built."""
    try:
        body = (resources.files(_FILES[name]) / "static" / name).read_bytes()
    except FileNotFoundError:
        raise NotFound(
            f"{name} does not exist until the package is built: run `pip install --editable .` once."
        ) from None
    return body, f'"{sha256(body).hexdigest()[:24]}"'
