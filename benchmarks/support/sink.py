"""Defines a server for benchmarks of the agent alone, which accepts everything that agents send."""

from __future__ import annotations

import http.server
from pathlib import Path


class Sink(http.server.ThreadingHTTPServer):
    """Returns 200 for every request, and appends the route and body of each batch of samples to `samples`, if given."""

    daemon_threads = True

    def __init__(self, port: int = 0, samples: Path | None = None) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.samples = samples
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Sink

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.server.samples is not None and self.path.endswith("/samples"):
            with self.server.samples.open("ab") as file:
                file.write(self.path.encode() + b" " + body + b"\n")
        answer = b'{"stored": 1, "duplicates": 0}'
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_PATCH = do_GET = do_POST

    def log_message(self, format: str, *arguments: object) -> None:
        pass
