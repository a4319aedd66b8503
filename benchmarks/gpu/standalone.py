"""Lets the agent's sources run where nothing is installed but torch: no Tula, no Pydantic, no httpx."""

from __future__ import annotations

import http.client
import importlib.util
import sys
import types
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def prepare() -> None:
    """Make `tula_agent` importable from this checkout, and put stand-ins where its two requirements are missing."""
    if importlib.util.find_spec("tula_agent") is None:
        sys.path[:0] = [str(ROOT / "agent"), str(ROOT / "client")]
    if importlib.util.find_spec("pydantic") is None:
        # Most modules of the contract that the agent imports need no Pydantic; the package's own file does. Thresholds
        # are taken as they are: here the script sets them.
        pydantic: Any = types.ModuleType("pydantic")
        pydantic.ValidationError = ValueError
        problems: Any = types.ModuleType("tula_wire.problems")
        problems.remedy = str
        wire: Any = types.ModuleType("tula_wire")
        wire.__path__ = [str(ROOT / "client" / "tula_wire")]
        wire.ScalingThresholds = _Unchecked
        sys.modules |= {"pydantic": pydantic, "tula_wire": wire, "tula_wire.problems": problems}
    if importlib.util.find_spec("httpx") is None:
        client: Any = types.ModuleType("httpx")
        client.Client, client.Limits, client.Timeout = _Client, _Options, _Options
        client.HTTPError, client.InvalidURL = http.client.HTTPException, ValueError
        sys.modules.setdefault("httpx", client)


class _Unchecked:
    """Takes the place of `tula_wire.ScalingThresholds`, which checks values by Pydantic."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    @classmethod
    def model_validate(cls, values: dict[str, Any], *, strict: bool) -> _Unchecked:
        del strict
        return cls(values)

    def model_dump(self, *, exclude_unset: bool) -> dict[str, Any]:
        del exclude_unset
        return self._values


class _Options:
    """Takes what `httpx.Limits` and `httpx.Timeout` take and keeps the number of seconds."""

    def __init__(self, seconds: float = 5.0, **_: Any) -> None:
        self.seconds = seconds


class _Response:
    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self.status_code, self.headers, self._content = answer.status, answer.headers, answer.read()

    def iter_raw(self) -> Iterator[bytes]:
        yield self._content


class _Client:
    """As much of `httpx.Client` as the agent's transport uses; without TLS and proxies."""

    def __init__(self, *, base_url: str, headers: dict[str, str], timeout: _Options, limits: _Options) -> None:
        del limits
        self._headers = headers
        self._connection = http.client.HTTPConnection(urllib.parse.urlsplit(base_url).netloc, timeout=timeout.seconds)

    @contextmanager
    def stream(
        self, method: str, path: str, *, content: bytes | None, headers: dict[str, str] | None, extensions: Any
    ) -> Iterator[_Response]:
        del extensions  # they limit a slow service; this one is in the same process
        try:
            self._connection.request(method, path, content, self._headers | (headers or {}))
            response = _Response(self._connection.getresponse())
        except Exception:
            self._connection.close()  # the next request connects again
            raise
        yield response

    def close(self) -> None:
        self._connection.close()
