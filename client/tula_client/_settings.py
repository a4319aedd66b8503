"""Address and token of the service: from arguments, else from TULA_URL and TULA_TOKEN."""

from __future__ import annotations

import os
import ssl
from importlib.metadata import PackageNotFoundError, version
from typing import Final
from urllib.parse import urlsplit

from tula_client._errors import TulaError

DEFAULT_URL: Final = "http://127.0.0.1:8321"


def service_url(url: str | None = None) -> str:
    """The service's address without a trailing slash; raises `TulaError` if it is no HTTP address."""
    address = (url or os.environ.get("TULA_URL") or DEFAULT_URL).strip().rstrip("/")
    try:
        parts = urlsplit(address)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        good = False
    if not good:
        raise TulaError(f"TULA_URL: {address!r} is no HTTP address: give one such as {DEFAULT_URL}")
    return address


def tls_verification(url: str) -> ssl.SSLContext | bool:
    """The argument `verify` of httpx; over plain HTTP, an empty context, as loading all authorities takes 30 ms."""
    return url.startswith("https:") or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def headers(token: str | None = None) -> dict[str, str]:
    """Headers of every request; raises `TulaError` for a token that a header cannot hold."""
    secret = (token if token is not None else os.environ.get("TULA_TOKEN", "")).strip()
    if not (secret.isascii() and secret.isprintable() and " " not in secret):
        raise TulaError("TULA_TOKEN holds a space, a line break or a letter beyond ASCII: copy the token again")
    agent = {"User-Agent": f"tula/{package_version()}"}
    return {**agent, "Authorization": f"Bearer {secret}"} if secret else agent


def package_version() -> str:
    """The installed version of Tula."""
    try:
        return version("tula")
    except PackageNotFoundError:
        return "0.0.0"
