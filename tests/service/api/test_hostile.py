"""Bodies that a client should not send, against a real server."""

from __future__ import annotations

import gzip
import socket
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.conftest import migrate
from tests.service.api.prepared import Prepared, prepare
from tests.support.server import Server, serving
from tula_wire import routes


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Prepared]]:
    """A service with little patience."""
    database = f"sqlite:///{tmp_path_factory.mktemp('hostile') / 'tula.db'}"
    migrate(database)
    with serving(database, body_timeout_s=1.0) as server:
        yield server, prepare(database)


class TestHostileBodies:
    """A client that misbehaves costs itself, not others."""

    def head(self, prepared: Prepared, *more: str) -> bytes:
        """The start of a telemetry request."""
        lines = [
            f"POST {routes.RUN_TELEMETRY.format(run_id=prepared.run_id)} HTTP/1.1",
            "Host: x",
            f"Authorization: Bearer {prepared.token}",
            "Content-Type: application/json",
            *more,
        ]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    def test_a_slow_body_is_cut_off(self, served: tuple[Server, Prepared]) -> None:
        server, prepared = served
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as wire:
            wire.sendall(self.head(prepared, "Content-Length: 1000") + b"{")
            began = time.monotonic()
            assert b" 408 " in wire.recv(4096).split(b"\r\n")[0]
            assert 0.5 < time.monotonic() - began < 5

    def test_many_slow_bodies_leave_room_for_others(self, served: tuple[Server, Prepared]) -> None:
        server, prepared = served
        wires = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
        for wire in wires:
            wire.sendall(self.head(prepared, "Content-Length: 1000") + b"{")
        headers = {"Authorization": f"Bearer {prepared.token}"}
        began = time.monotonic()
        assert httpx.get(server.url + routes.JOBS, headers=headers).status_code == 200
        assert time.monotonic() - began < 1.0
        for wire in wires:
            wire.close()

    def test_a_declared_gibibyte_is_refused_unread(self, served: tuple[Server, Prepared]) -> None:
        server, prepared = served
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as wire:
            wire.sendall(self.head(prepared, f"Content-Length: {2**30}"))
            assert b" 413 " in wire.recv(4096).split(b"\r\n")[0]

    def test_an_undeclared_gibibyte_is_refused_on_the_way(self, served: tuple[Server, Prepared]) -> None:
        server, prepared = served
        sent = 0
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as wire:
            wire.sendall(self.head(prepared, "Transfer-Encoding: chunked"))
            piece = b"10000\r\n" + bytes(0x10000) + b"\r\n"
            try:
                while sent < 2**30:
                    wire.sendall(piece)
                    sent += 0x10000
            except OSError:
                pass
        assert sent < 64 * 2**20

    def test_a_bomb_does_not_grow_the_service(self, served: tuple[Server, Prepared]) -> None:
        server, prepared = served
        bomb = gzip.compress(bytes(512 * 2**20))
        process = psutil.Process(server.process.pid)
        before = process.memory_info().rss
        headers = {
            "Authorization": f"Bearer {prepared.token}",
            "Content-Type": "application/json",
            "Content-Encoding": "gzip",
        }
        path = server.url + routes.RUN_TELEMETRY.format(run_id=prepared.run_id)
        for _ in range(4):
            assert httpx.post(path, content=bomb, headers=headers).status_code == 413
        assert process.memory_info().rss - before < 200 * 2**20


class TestHostileHeads:
    """Nobody needs a token to send the head of a request, so it is bounded before anything else."""

    def test_an_endless_head_is_refused_on_the_way(self, served: tuple[Server, Prepared]) -> None:
        server, _ = served
        process = psutil.Process(server.process.pid)
        before = process.memory_info().rss
        for piece in (b"a" * 0x10000, b"x-more: " + b"a" * 100 + b"\r\n" * 1000):
            sent = 0
            with socket.create_connection(("127.0.0.1", server.port), timeout=10) as wire:
                wire.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Long: a" + piece[:1])
                try:
                    while sent < 2**30:
                        wire.sendall(piece)
                        sent += len(piece)
                except OSError:
                    pass
            assert sent < 64 * 2**20
        assert process.memory_info().rss - before < 100 * 2**20

    def test_the_refusal_says_why(self, served: tuple[Server, Prepared]) -> None:
        server, _ = served
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as wire:
            wire.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 70_000)
            answered = b""
            while piece := wire.recv(4096):
                answered += piece
        assert answered.startswith(b"HTTP/1.1 431 ")
        assert b"shorter headers" in answered
        assert httpx.get(server.url + "/healthz", headers={"X-Long": "a" * 50_000}).status_code == 200

    @pytest.mark.parametrize("begun", [b"", b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Slow: "])
    def test_a_slow_head_is_cut_off(self, served: tuple[Server, Prepared], begun: bytes) -> None:
        server, _ = served
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as wire:
            wire.sendall(begun)
            assert wire.recv(4096) == b""

    def test_the_rest_of_a_body_that_was_refused_has_to_come_soon(self, served: tuple[Server, Prepared]) -> None:
        server, prepared = served
        head = f"POST {routes.RUN_TELEMETRY.format(run_id=prepared.run_id)} HTTP/1.1\r\nHost: x\r\n"
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as wire:
            wire.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{{".encode())
            answered = b""
            while piece := wire.recv(4096):
                answered += piece
        assert answered.startswith(b"HTTP/1.1 401 ")

    def test_a_connection_serves_on_where_heads_come_in_pieces(self, served: tuple[Server, Prepared]) -> None:
        server, _ = served
        request = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as wire:
            for place in (1, 10, len(request) - 1):
                wire.sendall(request[:place])
                wire.sendall(request[place:] + request)
                got = b""
                while got.count(b'"status":"ok"') < 2:
                    piece = wire.recv(4096)
                    assert piece
                    got += piece
