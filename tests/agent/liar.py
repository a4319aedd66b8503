"""Runs an HTTP server on loopback whose responses have wrong fields or are sent incorrectly."""

from __future__ import annotations

import gzip
import http.server
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

NONSENSE: dict[str, str] = {
    "text": '"boom"', "table": '{"a": 1}', "true": "true", "nan": "NaN", "infinity": "Infinity",
    "1e400": "1e400", "fraction": "0.4375", "negative": "-3", "zero": "0", "2^63": "9223372036854775808",
    "huge": "1e38",
}  # fmt: skip
"""JSON texts, some of which only Python reads as such."""

DELIVERIES = ("megabytes", "bomb", "drip", "dripped_head", "endless", "deep", "long_number", "torn", "nothing")
"""Ways to send an answer that no service takes."""

WITHIN_S = 30.0
"""How long a slow answer goes on unless the client hangs up before: far above what a busy machine adds."""


@dataclass(frozen=True)
class Lie:
    """A response with `text` as its body; `delivery`, if given, names the incorrect way in which it is sent."""

    name: str
    text: str = "{}"
    delivery: str = ""


def field_lies(truth: dict[str, Any]) -> list[Lie]:
    """Return variants of a true response: each lacks one field or has an invalid value in it."""
    lies = []
    for name in truth:
        others = {key: value for key, value in truth.items() if key != name}
        lies.append(Lie(f"{name} missing", json.dumps(others)))
        for kind, text in NONSENSE.items():
            body = json.dumps({**others, name: "HERE"}).replace('"HERE"', text)
            lies.append(Lie(f"{name} {kind}", body))
    return lies


def deliveries() -> list[Lie]:
    """Return one lie for each incorrect way to send a response."""
    return [Lie(name, delivery=name) for name in DELIVERIES]


@dataclass
class Liar:
    """A server that answers with its `lies`, which maps the end of a request's path to the responses.

    When the lies for a path are used up, the response is `truth` for `/scaling`; for any other path, it is the entry of
    `truths` whose key is the end of the path.
    """

    lies: dict[str, list[Lie]]
    truth: dict[str, Any] = field(default_factory=dict)
    truths: dict[str, Any] = field(default_factory=dict)
    forever: str = ""
    paths: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def next(self, path: str) -> Lie:
        """Return the response to the next request for `path`."""
        if self.forever:
            return Lie(self.forever, delivery=self.forever)
        route = path.partition("?")[0]
        self.paths.append(route)
        for ending, lies in self.lies.items():
            if route.endswith(ending) and lies:
                return lies.pop(0)
        truths = {"/scaling": self.truth, **self.truths}
        found = next(
            (truth for ending, truth in truths.items() if route.endswith(ending)), {"stored": 1, "duplicates": 0}
        )
        return Lie("truth", json.dumps(found))


@contextmanager
def lying(liar: Liar) -> Iterator[Liar]:
    """Serve the liar's responses on a free port of the loopback interface."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"liar": liar}))
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients hang up, as they should
    liar.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield liar
    finally:
        liar.stop.set()
        server.shutdown()
        server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or head and body, two writes, are 40 ms apart
    liar: Liar

    def handle_any(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        lie = self.liar.next(self.path)
        if lie.delivery:
            self.close_connection = True
            getattr(self, f"_{lie.delivery}")()
        else:
            self._send(lie.text.encode())

    do_GET = do_POST = do_PATCH = handle_any

    def _send(self, body: bytes, length: int | None = None, **headers: str) -> None:
        self.send_response(200)
        for name, value in {"content-length": str(length or len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def _slowly(self, data: bytes) -> None:
        ends = time.monotonic() + WITHIN_S
        while not self.liar.stop.wait(0.05) and time.monotonic() < ends:
            self.wfile.write(data)
            self.wfile.flush()

    def _megabytes(self) -> None:
        self._send(_MEGABYTES)

    def _bomb(self) -> None:
        self._send(_BOMB, content_encoding="gzip", etag='"bomb"')

    def _drip(self) -> None:
        self._send(b"", length=1000)
        self._slowly(b" ")

    def _dripped_head(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\nx: ")
        self._slowly(b"x")

    def _endless(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        while not self.liar.stop.is_set():
            self.wfile.write(chunk)

    def _deep(self) -> None:
        self._send(b"[" * 60_000)

    def _long_number(self) -> None:
        self._send(b'{"version": ' + b"9" * 60_000 + b"}")

    def _torn(self) -> None:
        self._send(b'{"version": 2', length=100)

    def _nothing(self) -> None:
        """Close the connection without a response."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


_MEGABYTES = b'{"version": 2, "reason": "' + b"x" * 4_000_000 + b'"}'
_BOMB = gzip.compress(b'{"version": 2, "reason": "' + b"x" * 32_000_000 + b'"}')
