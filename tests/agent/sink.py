"""A real HTTP server that takes what agents send, checks it against the contract, and misbehaves on demand."""

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
    """What came in, and how to behave: ok, error (500), garbage, html, hang, trickle, refuse (422), busy (429)."""

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

    def wait(self, condition: Any, within_s: float = 20.0) -> None:
        ends = time.monotonic() + within_s
        while not condition(self):
            assert time.monotonic() < ends, f"still waiting; so far {self.seen}"
            time.sleep(0.01)


def start(sink: Sink, port: int = 0) -> http.server.ThreadingHTTPServer:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            sink.seen.append((self.command, self.path))
            behaviour = sink.behaviour
            if behaviour == "hang":
                sink.released.wait(60)
                self.close_connection = True
                return None
            if behaviour == "garbage":
                self.wfile.write(b"\x00\xff<<< not http >>>\r\n\r\n")
                self.close_connection = True
                return None
            if behaviour == "html":
                return self.answer(200, b"<html>please log in</html>")
            if behaviour == "trickle":
                self.send_response(200)
                self.send_header("content-length", "1000")
                self.end_headers()
                while not sink.released.wait(0.2):
                    self.wfile.write(b" ")
                    self.wfile.flush()
                self.close_connection = True
                return None
            if behaviour == "error":
                return self.answer(500, b'{"detail": "on purpose"}')
            if behaviour == "refuse":
                return self.answer(422, b'{"detail": "on purpose"}')
            if behaviour == "busy":
                return self.answer(429, b'{"detail": "too many"}', {"retry-after": sink.retry_after or "0"})
            return self.take(body)

        def take(self, body: bytes) -> None:
            if self.command == "GET":
                sink.gets.append(self.headers.get("if-none-match") or "")
                if self.path in sink.pages:
                    return self.answer(sink.pages[self.path], b'{"detail": "as told"}')
                if self.path.partition("?")[0].endswith("/scaling") and sink.scaling is not None:
                    etag = f'"{sink.scaling["version"]}"'
                    if self.headers.get("if-none-match") == etag:
                        return self.answer(304, b"")
                    return self.answer(200, json.dumps(sink.scaling).encode(), {"etag": etag})
                if sink.run is not None and self.path.startswith("/v1/runs/"):
                    return self.answer(200, json.dumps(sink.run).encode())
                return self.answer(404, b'{"detail": "nothing here"}')
            parsed = json.loads(body)
            model = RunPatch
            if self.path.endswith("/samples"):
                model = SampleBatch
            elif self.path.endswith("/telemetry"):
                model = TelemetryChunk
            try:
                model.model_validate_json(body)
            except ValueError as error:
                sink.invalid.append(str(error))
                return self.answer(422, b'{"detail": "does not fit the contract"}')
            sink.requests.append((self.command, self.path, parsed))
            return self.answer(200, json.dumps({"stored": 1, "duplicates": 0, "stop": sink.stop}).encode())

        def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PATCH = handle_any

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # clients that give up are what some tests are about

    server = Server(("127.0.0.1", port), Handler)
    sink.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    return server
