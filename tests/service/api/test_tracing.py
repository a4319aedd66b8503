"""Tests that the service sends traces as OTLP over HTTP, with a collector in this process that parses the requests."""

from __future__ import annotations

import gzip
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from benchmarks.support.forked import Server
from benchmarks.support.server import make_token
from tula_wire import routes


class Collector(ThreadingHTTPServer):
    """The part of an OpenTelemetry collector that receives traces."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Receiver)
        self.packets: list[tuple[str, str, ExportTraceServiceRequest]] = []

    def spans(self) -> list[Span]:
        """Return every span that has arrived."""
        return [
            span
            for _, _, packet in self.packets
            for resource in packet.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


class _Receiver(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        packet = ExportTraceServiceRequest.FromString(body)
        self.server.packets.append((self.path, self.headers["Content-Type"], packet))
        answer = ExportTraceServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    """Start a collector on a free port."""
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_a_request_becomes_one_span_in_the_collector(
    sqlite_url: str, collector: Collector, monkeypatch: pytest.MonkeyPatch, compression: str
) -> None:
    """The span has the route, the status and the caller's trace as its parent, but no secret; probes have no span."""
    secret = make_token(sqlite_url)
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", compression)
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    headers = {"Authorization": f"Bearer {secret}", "traceparent": f"00-{trace}-{parent}-01"}
    with Server(sqlite_url, trace=1) as server:
        assert httpx.get(server.url + routes.HEALTH).status_code == 200
        assert httpx.get(server.url + routes.JOB.format(job_id="job-0"), headers=headers).status_code == 404
    # Stopping the service sends what it still holds.
    assert {(path, kind) for path, kind, _ in collector.packets} == {("/v1/traces", "application/x-protobuf")}
    names = {
        attribute.value.string_value
        for _, _, packet in collector.packets
        for resource in packet.resource_spans
        for attribute in resource.resource.attributes
        if attribute.key == "service.name"
    }
    assert names == {"tula"}
    (served,) = [span for span in collector.spans() if span.kind == Span.SPAN_KIND_SERVER]
    assert (served.trace_id.hex(), served.parent_span_id.hex()) == (trace, parent)
    attributes = {one.key: one.value for one in served.attributes}
    assert attributes["http.route"].string_value == routes.JOB
    status = attributes.get("http.response.status_code", attributes.get("http.status_code"))
    assert status is not None
    assert status.int_value == 404
    assert served.end_time_unix_nano > served.start_time_unix_nano
    assert not any(secret in str(packet) for _, _, packet in collector.packets)


def test_a_collector_that_is_not_there_changes_nothing(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing delays neither responses nor the shutdown."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    headers = {"Authorization": f"Bearer {make_token(sqlite_url)}"}
    with Server(sqlite_url, trace=1) as server:
        assert httpx.get(server.url + routes.JOBS, headers=headers).status_code == 200
        assert server.stop() in (0, -15)
