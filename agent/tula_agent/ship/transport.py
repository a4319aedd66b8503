"""Sends HTTP requests to the service, and classifies each request as delivered, refused, or to be retried."""

from __future__ import annotations

import json
import logging
import re
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Literal

from tula_agent.ship.spool import SpooledRequest
from tula_wire.retry import retry_after_s
from tula_wire.samples import LEASE_HEADER
from tula_wire.text import printable


@contextmanager
def _without_its_command(name: str) -> Iterator[None]:
    """Inside the context, hide the optional command-line client of the package `name` from imports.

    The command-line client of httpx imports rich, which uses the global `random` generator on import. If it were
    imported, a measured script would draw different random numbers from an unmeasured one.
    """
    part = f"{name}._main"
    sys.modules.setdefault(part, None)  # type: ignore[arg-type]
    try:
        yield
    finally:
        if sys.modules[part] is None:
            del sys.modules[part]


with _without_its_command("httpx"):
    import httpx

Verdict = Literal["delivered", "refused", "retry"]
_RETRIED = {408, 425, 429}
_OUR_PROBLEMS = "urn:tula:problem:"
"""Prefix of the problem `type` when the service itself refuses a request."""
MAX_RETRY_AFTER_S = 300.0
MAX_ANSWER_BYTES = 64 * 2**10
"""Maximum number of bytes to read from a response; a Tula service never sends an agent more."""
_PIECE_BYTES = 2**16
_ETAG = re.compile(r'(?:W/)?"[\x21\x23-\x7e]{0,200}"')  # RFC 9110, section 8.8.3; other tags are ignored


@dataclass(frozen=True)
class Reply:
    """Outcome of a request. `retry_after_s`: the pause that the service requests; `body`: the parsed response."""

    verdict: Verdict
    status: int = 0
    body: dict[str, Any] | None = None
    retry_after_s: float | None = None
    detail: str = ""
    etag: str | None = None


class Transport:
    """HTTP client with one deadline for a whole exchange, for use by one thread of one process.

    httpx limits each read and write separately, and a service that sends one byte per second would never exceed these
    limits. So `_limit` gives each read and write only the remaining part of `timeout_s`. Responses are not
    decompressed. `trust_env` remains on, since clusters often reach other networks through proxies. Redirects are not
    followed, since they would leak the token.
    """

    def __init__(
        self,
        url: str,
        token: str | None,
        timeout_s: float,
        *,
        over: httpx.BaseTransport | None = None,
        verify: ssl.SSLContext | bool = True,
    ) -> None:
        self._timeout_s, self._ends = timeout_s, 0.0
        headers = {"user-agent": "tula-agent", "content-type": "application/json", "accept-encoding": "identity"}
        if token:
            headers["authorization"] = f"Bearer {token}"
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1)
        timeout = httpx.Timeout(timeout_s, connect=min(2.0, timeout_s))
        self._client = httpx.Client(
            base_url=url, headers=headers, timeout=timeout, limits=limits, transport=over, verify=verify
        )
        self._exchanging_thread: int | None = None
        logging.getLogger("httpx").addFilter(self._is_of_the_script)  # httpx logs each request at level INFO

    def send(self, request: SpooledRequest) -> Reply:
        """Send one request and return the reply. A failure of the service or the network is returned as a reply, never
        raised.
        """
        headers = None if request.lease is None else {LEASE_HEADER: str(request.lease)}
        return self.exchange(request.method, request.path, request.body, headers)

    def get(self, path: str, etag: str | None = None) -> Reply:
        """Read `path`; if the resource still has `etag`, the reply has status 304 and no body."""
        return self.exchange("GET", path, None, {"if-none-match": etag} if etag else None)

    def close(self) -> None:
        """Close the connection."""
        logging.getLogger("httpx").removeFilter(self._is_of_the_script)
        self._client.close()

    def _is_of_the_script(self, record: logging.LogRecord) -> bool:  # noqa: ARG002
        """Return True if a log record belongs to one of the script's own requests, which run on other threads.

        URLs cannot distinguish these requests, since httpx may log a URL in a different spelling, and the script's URL
        may begin with the service's URL.
        """
        return threading.get_ident() != self._exchanging_thread

    def exchange(self, method: str, path: str, body: bytes | None, headers: dict[str, str] | None = None) -> Reply:
        """Send one request, with or without a JSON body, and return the reply."""
        self._ends = time.monotonic() + self._timeout_s
        self._exchanging_thread = threading.get_ident()
        traced = {"trace": self._limit}
        try:
            with self._client.stream(method, path, content=body, headers=headers, extensions=traced) as response:
                content = b""
                for part in response.iter_raw():
                    content += part
                    if len(content) > MAX_ANSWER_BYTES:
                        return Reply("retry", detail=f"the response is longer than {MAX_ANSWER_BYTES} bytes")
        except httpx.LocalProtocolError:  # the error's text would contain the header, and so the token
            return Reply(
                "retry", detail="a header cannot be sent: check that the token is not empty and has no line break"
            )
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            return Reply("retry", detail=printable(f"{type(error).__name__}: {error}"[:500]))
        finally:
            self._exchanging_thread = None
        status = response.status_code
        asked_s = retry_after_s(response.headers.get("retry-after"), datetime.now(timezone.utc))
        parsed = None
        with suppress(ValueError, RecursionError):
            parsed = json.loads(content)
        parsed = parsed if isinstance(parsed, dict) else None
        if status == 304 or status == 204:
            return Reply("delivered", status)
        if 200 <= status < 300:
            if parsed is None:  # the page of a captive portal or a proxy
                return Reply("retry", status, detail="the response is not a JSON object")
            etag = response.headers.get("etag", "")
            return Reply("delivered", status, parsed, etag=etag if _ETAG.fullmatch(etag) else None)
        detail = printable(str((parsed or {}).get("detail", ""))[:500])
        # Only the service itself can refuse permanently; a proxy's 403 or 404 means that the service was not reached.
        is_ours = str((parsed or {}).get("type", "")).startswith(_OUR_PROBLEMS)
        verdict: Verdict = "refused" if is_ours and 400 <= status < 500 and status not in _RETRIED else "retry"
        return Reply(verdict, status, parsed, None if asked_s is None else min(asked_s, MAX_RETRY_AFTER_S), detail)

    def _limit(self, event: str, info: dict[str, Any]) -> None:
        """Apply the deadline to the reads and writes of a new connection, as a callback of httpcore's tracing."""
        if not event.endswith(("connect_tcp.complete", "start_tls.complete")):
            return
        stream = info["return_value"]
        read, write = stream.read, stream.write

        def read_in_time(max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ARG001
            return bytes(read(max_bytes, timeout=self._left_s()))

        def write_in_time(buffer: bytes, timeout: float | None = None) -> None:  # noqa: ARG001
            for start in range(0, len(buffer), _PIECE_BYTES):
                write(buffer[start : start + _PIECE_BYTES], timeout=self._left_s())

        stream.read, stream.write = read_in_time, write_in_time

    def _left_s(self) -> float:
        left = self._ends - time.monotonic()
        if left <= 0.0:
            raise TimeoutError(f"no complete response within {self._timeout_s:g} s")
        return left
