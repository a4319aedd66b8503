"""Hostile bodies: slow, endless, or small ones that decompress to gigabytes."""

from __future__ import annotations

import gzip
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import psutil
import pytest

from benchmarks.support.forked import Server
from benchmarks.support.prepared import Prepared, prepare
from benchmarks.support.server import migrate
from tula_service.api.middleware import BODY_TIMEOUT_S
from tula_wire import routes


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Prepared]]:
    """A service in a separate process, whose memory can be measured."""
    database = f"sqlite:///{tmp_path_factory.mktemp('hostile') / 'tula.db'}"
    migrate(database)
    with Server(database) as server:
        yield server, prepare(database)


class TestHostileBodies:
    """A hostile client does not slow others."""

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

    def test_many_slow_bodies_leave_room_for_others(self, served: tuple[Server, Prepared]) -> None:
        server, prepared = served
        headers = {"Authorization": f"Bearer {prepared.token}"}
        with ExitStack() as stack:
            for _ in range(100):
                wire = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
                wire.sendall(self.head(prepared, "Content-Length: 1000") + b"{")
            began = time.monotonic()
            assert httpx.get(server.url + routes.JOBS, headers=headers).status_code == 200
            assert time.monotonic() - began < 0.75 * BODY_TIMEOUT_S

    def test_a_declared_gibibyte_is_refused_unread(self, served: tuple[Server, Prepared]) -> None:
        server, prepared = served
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as wire:
            wire.sendall(self.head(prepared, f"Content-Length: {2**30}"))
            assert b" 413 " in wire.recv(4096).split(b"\r\n")[0]

    def test_an_undeclared_gibibyte_is_refused_on_the_way(self, served: tuple[Server, Prepared]) -> None:
        server, prepared = served
        sent = 0
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as wire:
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
