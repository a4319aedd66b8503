"""Load from separate client processes: keep-alive connections that send prepared bodies and time every answer."""

from __future__ import annotations

import multiprocessing
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Load", "Measured", "Request", "drive"]


@dataclass(frozen=True)
class Request:
    """One kind of request: the body is `head`, eight big-endian bytes of a number that never repeats, `tail`.

    With `textual`, the number is written as 19 decimal digits instead, for JSON.
    """

    path: str
    content_type: str
    head: bytes
    tail: bytes
    textual: bool = False
    method: str = "POST"

    def body(self, number: int) -> bytes:
        """The body that carries this number; every number below 2^63 gives the same length."""
        mark = b"%019d" % number if self.textual else number.to_bytes(8, "big")
        return b"".join((self.head, mark, self.tail))


@dataclass(frozen=True)
class Load:
    """How much: client processes, connections of each, and seconds to warm up and to measure."""

    processes: int = 2
    connections: int = 4
    warmup_s: float = 1.5
    measure_s: float = 6.0


@dataclass(frozen=True)
class Measured:
    """Answers in the measuring window."""

    requests: int
    seconds: float
    p50_ms: float
    p99_ms: float
    failed: int

    @property
    def per_s(self) -> float:
        """Requests a second."""
        return self.requests / self.seconds


def drive(host: str, port: int, headers: str, requests: Sequence[Request], load: Load) -> Measured:
    """Send in a closed loop from `load.processes` processes; a request that is not answered 2xx counts as failed."""
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[tuple[list[float], int]] = context.Queue()
    begin = context.Barrier(load.processes + 1)
    clients = [
        context.Process(target=_client, args=(host, port, headers, requests, load, number, begin, results))
        for number in range(load.processes)
    ]
    for client in clients:
        client.start()
    begin.wait()
    collected = [results.get() for _ in clients]
    for client in clients:
        client.join()
    latencies = np.array([one for found, _ in collected for one in found])
    failed = sum(number for _, number in collected)
    if not latencies.size:
        return Measured(0, load.measure_s, float("nan"), float("nan"), failed)
    p50, p99 = np.quantile(latencies, [0.5, 0.99]) * 1e3
    return Measured(int(latencies.size), load.measure_s, float(p50), float(p99), failed)


def _client(
    host: str,
    port: int,
    headers: str,
    requests: Sequence[Request],
    load: Load,
    number: int,
    begin: threading.Barrier,
    results: multiprocessing.Queue[tuple[list[float], int]],
) -> None:
    latencies: list[float] = []
    failures: list[int] = []
    begin.wait()
    started = time.perf_counter()
    window = (started + load.warmup_s, started + load.warmup_s + load.measure_s)
    threads = [
        threading.Thread(
            target=_connection,
            args=(
                host,
                port,
                headers,
                requests,
                (number * load.connections + which) << 32,
                window,
                latencies,
                failures,
            ),
        )
        for which in range(load.connections)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put((latencies, len(failures)))


def _connection(
    host: str,
    port: int,
    headers: str,
    requests: Sequence[Request],
    first: int,
    window: tuple[float, float],
    latencies: list[float],
    failures: list[int],
) -> None:
    wire = socket.create_connection((host, port))
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    heads = [_head(host, port, headers, request) for request in requests]
    number = first
    while True:
        request, head = requests[number % len(requests)], heads[number % len(requests)]
        sent = head + request.body(number) if request.method == "POST" else head
        before = time.perf_counter()
        if before >= window[1]:
            break
        try:
            wire.sendall(sent)
            status = _answer(wire)
        except OSError:  # the server is gone
            failures.append(0)
            break
        after = time.perf_counter()
        if window[0] <= after < window[1]:
            if 200 <= status < 300:
                latencies.append(after - before)
            else:
                failures.append(status)
        number += 1
    wire.close()


def _head(host: str, port: int, headers: str, request: Request) -> bytes:
    length = len(request.body(0))
    body = f"Content-Type: {request.content_type}\r\nContent-Length: {length}\r\n" if request.method == "POST" else ""
    return f"{request.method} {request.path} HTTP/1.1\r\nHost: {host}:{port}\r\n{headers}{body}\r\n".encode()


def _answer(wire: socket.socket, receive: Callable[[int], bytes] | None = None) -> int:
    receive = receive or wire.recv

    def more() -> bytes:
        got = receive(65536)
        if not got:
            raise ConnectionError("the server closed the connection before it had answered")
        return got

    got = more()
    while b"\r\n\r\n" not in got:
        got += more()
    head, _, body = got.partition(b"\r\n\r\n")
    length = 0
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            length = int(line[15:])
    missing = length - len(body)
    while missing > 0:
        missing -= len(more())
    return int(head[9:12])
