"""Where the service is and who we are: from arguments, else from TULA_URL and TULA_TOKEN."""

from __future__ import annotations

import os
import ssl
from importlib.metadata import PackageNotFoundError, version
from typing import Final
from urllib.parse import urlsplit

from tula_client._errors import TulaError

__all__ = ["DEFAULT_URL", "authorities", "headers", "package_version", "service_url"]

DEFAULT_URL: Final = "http://127.0.0.1:8321"


def service_url(url: str | None = None) -> str:
    """The service's address without a trailing slash; raises `TulaError` for one that is no http address."""
    address = (url or os.environ.get("TULA_URL") or DEFAULT_URL).strip().rstrip("/")
    try:
        parts = urlsplit(address)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        good = False
    if not good:
        raise TulaError(f"TULA_URL: {address!r} is no address: give one such as {DEFAULT_URL}")
    return address


def authorities(url: str) -> ssl.SSLContext | bool:
    """What httpx takes as `verify`: over plain HTTP nobody is trusted, since loading all authorities takes 30 ms."""
    return url.startswith("https:") or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def headers(token: str | None = None) -> dict[str, str]:
    """What every request carries; raises `TulaError` for a token that no header can hold."""
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
