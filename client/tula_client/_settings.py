"""Reads the service's address and token from arguments, the environment, `.env`, or the user's config file."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from tula_client._errors import TulaError, UsageError
from tula_client._spec import read_toml

DEFAULT_URL: Final = "http://127.0.0.1:8321"


@dataclass(frozen=True)
class Access:
    """The service's address, the token to send ("" for no token), and where the address comes from.

    `origin` is `argument`, `TULA_URL`, `default`, or the path of a file. `file` is that path, or None if the values do
    not come from a file.
    """

    url: str
    token: str
    origin: str
    file: Path | None = None


_NOTHING: Final = Access("", "", "")


def access(url: str | None = None, token: str | None = None) -> Access:
    """Return the address, without a trailing slash, and the token, each from the first source that sets it.

    With `token=""`, no token is sent.

    A token is sent only to the address from the same source, or to the default address if that source sets no address,
    so that the `.env` file in a downloaded folder cannot redirect a token. The TULA_TOKEN variable is also sent to an
    address that is given as an argument. Raises `TulaError` if the address or the token is malformed, if a file cannot
    be used, or if other users of this machine can read the token.
    """
    given = Access(url or "", token or "", "argument")
    named = given if given.url else None
    chosen = given if token is not None else None
    places: list[Access] = []
    for read in _PLACES:
        if named and chosen:
            break
        places.append(read())
        named = named or (places[-1] if places[-1].url else None)
        if named is not None:
            chosen = chosen or _sent_to(named, places)
    named = named or Access(DEFAULT_URL, "", "default")
    chosen = chosen or _sent_to(named, places)
    secret = _usable_token(chosen) if chosen else ""
    return Access(_usable_url(named), secret, named.origin)


def _sent_to(named: Access, places: list[Access]) -> Access | None:
    """Return the first source in `places` whose token may be sent to the address that `named` sets, or None."""
    for place in places:
        by_argument = place.file is None and named.origin == "argument"
        if place.token and (by_argument or _bare(place.url or DEFAULT_URL) == _bare(named.url)):
            return place
    return None


def config_path() -> Path:
    """Return the path of the user's config file, which is `~/.config/tula/config.toml` on Linux."""
    import platformdirs

    return platformdirs.user_config_path("tula") / "config.toml"


def _environment() -> Access:
    return Access(os.environ.get("TULA_URL", ""), os.environ.get("TULA_TOKEN", ""), "TULA_URL")


def _dotenv() -> Access:
    """Return TULA_URL and TULA_TOKEN from `.env` in the working directory; ignore its other lines."""
    path = Path(".env").absolute()
    try:
        text = path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError:  # the file does not exist, or `.env` is a folder, such as a virtual environment
        return _NOTHING
    pairs = (line.strip().removeprefix("export ").partition("=") for line in text.splitlines())
    values = {name.strip(): value.strip().strip("'\"") for name, _, value in pairs}
    return Access(values.get("TULA_URL", ""), values.get("TULA_TOKEN", ""), str(path), path)


def _config_file() -> Access:
    """Return `url` and `token` from the config file."""
    path = config_path()
    with suppress(PermissionError):  # `read_toml` reports this error
        if not path.exists():
            return _NOTHING
    values = read_toml(path, "make sure that you can read the file, or remove it")
    for name, value in values.items():
        if name not in ("url", "token") or not isinstance(value, str):
            raise TulaError(f"{path}: {name} cannot be used: set only url and token, each to a string in quotes")
    if values.get("token") and not values.get("url"):
        raise TulaError(f"{path} sets token but not url: add the address of the service that accepts the token")
    return Access(values.get("url", ""), values.get("token", ""), str(path), path)


_PLACES: Final[tuple[Callable[[], Access], ...]] = (_environment, _dotenv, _config_file)


def _bare(url: str) -> str:
    return url.lstrip("\ufeff").strip().rstrip("/")


def _usable_url(place: Access) -> str:
    address = _bare(place.url)
    try:
        parts = urlsplit(address)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        good = False
    if not good:
        where = "" if place.file is None else f"{place.file}: "
        name = "url" if place.origin == "argument" else "TULA_URL"
        raise UsageError(f"{where}{name}: {address!r} is not an HTTP address: use one such as {DEFAULT_URL}")
    return address


def _usable_token(place: Access) -> str:
    secret = place.token.strip()
    if not (secret.isascii() and secret.isprintable() and " " not in secret):
        where = "" if place.file is None else f"{place.file}: "
        raise TulaError(
            f"{where}TULA_TOKEN contains a space, a line break or a non-ASCII character: copy the token again"
        )
    if place.file is not None and place.file.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        raise TulaError(f"{place.file} contains a token that other users can read: run chmod 600 {place.file}")
    return secret


def package_version() -> str:
    """Return the installed version of Tula, or 0.0.0 if only its source is on the path, as with Ray's `py_modules`."""
    try:
        return version("tula")
    except PackageNotFoundError:
        return "0.0.0"
