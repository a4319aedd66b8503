"""Runs a real HTTP server that receives what agents send, validates it, and misbehaves on demand."""

from __future__ import annotations

import http.server
import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from tula_wire import RunPatch, SampleBatch, TelemetryChunk


@dataclass
class Sink:
    """The requests received so far, and how the server behaves.

    The behaviour is one of ok, error (500), garbage, html, hang, trickle, refuse (422), unknown_token (401), busy
    (429).
    """

    behaviour: str = "ok"
    retry_after: str | None = None
    stop: bool = False
    scaling: dict[str, Any] | None = None
    run: dict[str, Any] | None = None
    pages: dict[str, int] = field(default_factory=dict)
    gets: list[str] = field(default_factory=list)
    requests: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    seen: list[tuple[str, str]] = field(default_factory=list)
    invalid: list[str] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def bodies(self, ending: str) -> list[dict[str, Any]]:
        return [body for _, path, body in self.requests if path.endswith(ending)]

    @property
    def samples(self) -> list[dict[str, Any]]:
        return self.bodies("/samples")

    @property
    def telemetry(self) -> list[dict[str, Any]]:
        return self.bodies("/telemetry")

    @property
    def states(self) -> list[str]:
        return [body["state"] for method, _, body in self.requests if method == "PATCH"]

    def steps(self, rank: int = 0) -> list[int]:
        return sorted(step for body in self.samples if body["rank"] == rank for step in body["step"])

    def column(self, name: str, rank: int = 0) -> dict[int, float]:
        found = {}
        for body in self.telemetry:
            if body["rank"] == rank and name in body["columns"]:
                pairs = zip(body["steps"], body["columns"][name], strict=True)
                found.update({step: value for step, value in pairs if value is not None})
        return found

    def rows(self, *names: str, rank: int = 0) -> list[tuple[Any, ...]]:
        out = []
        for body in self.samples:
            if body["rank"] == rank and all(name in body for name in names):
                out += zip(*(body[name] for name in names), strict=True)
        return sorted(out)

    def wait(self, condition: Any, within_s: float = 60.0) -> None:
        ends = time.monotonic() + within_s
        while not condition(self):
            assert time.monotonic() < ends, f"still waiting; so far {self.seen}"
            time.sleep(0.01)


class SinkServer(http.server.ThreadingHTTPServer):
    """The HTTP server of a sink."""

    daemon_threads = True

    def __init__(self, port: int, sink: Sink) -> None:
        self.sink = sink
        super().__init__(("127.0.0.1", port), Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # some tests are about clients that hang up


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers one request according to the behaviour of the sink."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or head and body, two writes, are 40 ms apart
    server: SinkServer

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        sink = self.server.sink
        sink.seen.append((self.command, self.path))
        misbehave = getattr(self, f"_{sink.behaviour}", None)
        if misbehave is not None:
            misbehave()
        elif self.command == "GET":
            self.answer_get()
        else:
            self.take(body)

    do_GET = do_POST = do_PATCH = handle_any

    def _hang(self) -> None:
        self.server.sink.released.wait(60)
        self.close_connection = True

    def _garbage(self) -> None:
        self.wfile.write(b"\x00\xff<<< not http >>>\r\n\r\n")
        self.close_connection = True

    def _html(self) -> None:
        self.answer(200, b"<html>please log in</html>")

    def _trickle(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "1000")
        self.end_headers()
        while not self.server.sink.released.wait(0.2):
            self.wfile.write(b" ")
            self.wfile.flush()
        self.close_connection = True

    def _error(self) -> None:
        self.answer(500, b'{"type": "urn:tula:problem:invalid-input", "detail": "on purpose"}')

    def _refuse(self) -> None:
        self.answer(422, b'{"type": "urn:tula:problem:invalid-input", "detail": "on purpose"}')

    def _unknown_token(self) -> None:
        self.answer(401, b'{"type": "urn:tula:problem:unauthenticated", "detail": "on purpose"}')

    def _busy(self) -> None:
        self.answer(429, b'{"detail": "too many"}', {"retry-after": self.server.sink.retry_after or "0"})

    def answer_get(self) -> None:
        sink = self.server.sink
        sink.gets.append(self.headers.get("if-none-match") or "")
        if self.path in sink.pages:
            return self.answer(sink.pages[self.path], b'{"detail": "set by the test"}')
        if self.path.partition("?")[0].endswith("/scaling") and sink.scaling is not None:
            etag = f'"{sink.scaling["version"]}"'
            if self.headers.get("if-none-match") == etag:
                return self.answer(304, b"")
            return self.answer(200, json.dumps(sink.scaling).encode(), {"etag": etag})
        if sink.run is not None and self.path.startswith("/v1/runs/"):
            return self.answer(200, json.dumps(sink.run).encode())
        return self.answer(404, b'{"type": "urn:tula:problem:not-found", "detail": "not found"}')

    def take(self, body: bytes) -> None:
        """Keep a request body that fits the contract; refuse any other."""
        sink = self.server.sink
        kind = self.path.rpartition("/")[2]
        model = {"samples": SampleBatch, "telemetry": TelemetryChunk}.get(kind, RunPatch)
        try:
            model.model_validate_json(body)
        except ValueError as error:
            sink.invalid.append(str(error))
            return self.answer(422, b'{"type": "urn:tula:problem:invalid-input", "detail": "does not fit"}')
        sink.requests.append((self.command, self.path, json.loads(body)))
        answer = {"stored": 1, "duplicates": 0, "stop": sink.stop and kind == "samples"}
        answer["run_ended"] = answer["stop"]
        return self.answer(200, json.dumps(answer).encode())

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def start(sink: Sink, port: int = 0) -> SinkServer:
    """In a new thread, start a server that listens on `port`, or on a free port."""
    server = SinkServer(port, sink)
    sink.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    return server
