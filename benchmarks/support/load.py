"""Sends requests from separate client processes over keep-alive connections, and records every response time."""

from __future__ import annotations

import multiprocessing
import re
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SENDER, NUMBER = b"@sender", b"@number"
_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")


@dataclass(frozen=True)
class Request:
    """A JSON POST; a connection replaces SENDER with its own number, and NUMBER with the number of the request."""

    path: str
    text: bytes

    def body(self, sender: int, number: int) -> bytes:
        """Return the body of one request; its length is the same for all values of `sender` and `number` below 10^9."""
        return self.text.replace(SENDER, b"%d" % (10**9 + sender)).replace(NUMBER, b"%d" % (10**9 + number))


@dataclass(frozen=True)
class Load:
    """The amount of load: client processes, connections per process, and seconds of warm-up and of measurement.

    If `requests` is set, a process ends after this number of responses, regardless of the time; only smoke runs set
    `requests`.
    """

    processes: int = 2
    connections: int = 4
    warmup_s: float = 1.5
    measure_s: float = 6.0
    requests: int | None = None

    def counts(self, at_s: float) -> bool:
        """Return True if a response that arrives `at_s` seconds after the first request is counted."""
        return self.requests is not None or self.warmup_s <= at_s < self.warmup_s + self.measure_s

    def goes_on(self, at_s: float, answers: int) -> bool:
        """Return True if a process should send more requests after `at_s` seconds and `answers` counted responses."""
        return at_s < self.warmup_s + self.measure_s if self.requests is None else answers < self.requests


@dataclass(frozen=True)
class Measured:
    """The responses during the measurement; `answered` also includes responses during the warm-up."""

    requests: int
    seconds: float
    p50_ms: float
    p99_ms: float
    failed: int
    answered: int

    @property
    def per_s(self) -> float:
        """Return the requests per second."""
        return self.requests / self.seconds


def drive(host: str, port: int, headers: str, requests: Sequence[Request], load: Load) -> Measured:
    """Send requests in a closed loop from `load.processes` processes; a request without a 2xx response counts as
    failed.
    """
    context = multiprocessing.get_context("fork")  # a fork imports nothing again
    results: multiprocessing.Queue[tuple[list[float], int, int]] = context.Queue()
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
    latencies = np.array([latency for latencies_s, _, _ in collected for latency in latencies_s])
    failed = sum(number for _, number, _ in collected)
    answered = sum(number for _, _, number in collected)
    if not latencies.size:
        return Measured(0, load.measure_s, float("nan"), float("nan"), failed, answered)
    p50, p99 = np.quantile(latencies, [0.5, 0.99]) * 1e3
    return Measured(int(latencies.size), load.measure_s, float(p50), float(p99), failed, answered)


def _client(
    host: str,
    port: int,
    headers: str,
    requests: Sequence[Request],
    load: Load,
    number: int,
    begin: threading.Barrier,
    results: multiprocessing.Queue[tuple[list[float], int, int]],
) -> None:
    first = number * load.connections
    lines = [_Line(host, port, headers, requests, first + which) for which in range(load.connections)]
    latencies: list[float] = []
    failures: list[int] = []
    answered = 0
    ready = selectors.DefaultSelector()
    for line in lines:
        ready.register(line.wire, selectors.EVENT_READ, line)
    begin.wait()
    started = time.perf_counter()
    for line in lines:
        _start_next(ready, line)
    working = len(lines)
    while working:
        for key, _ in ready.select():
            line = key.data
            try:
                status = line.move()
            except OSError:  # the server is gone
                status = 0
            if status is None:
                ready.modify(line.wire, line.waits_for(), line)
                continue
            now = time.perf_counter()
            answered += 200 <= status < 300
            if load.counts(now - started):
                if 200 <= status < 300:
                    latencies.append(now - line.began)
                else:
                    failures.append(status)
            if status and load.goes_on(now - started, len(latencies) + len(failures)):
                _start_next(ready, line)
            else:
                ready.unregister(line.wire)
                line.wire.close()
                working -= 1
    results.put((latencies, len(failures), answered))


def _start_next(ready: selectors.BaseSelector, line: _Line) -> None:
    if line.begin():
        ready.modify(line.wire, line.waits_for(), line)


class _Line:
    """A keep-alive connection with one request at a time. One thread handles many connections; several threads would
    compete for the GIL, and use more of the cores that the service needs.
    """

    def __init__(self, host: str, port: int, headers: str, requests: Sequence[Request], sender: int) -> None:
        self.wire = socket.create_connection((host, port))
        self.wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.wire.setblocking(False)
        self.began = 0.0
        self._requests = requests
        self._heads = [_head(host, port, headers, request) for request in requests]
        self._sender, self._number = sender, 0
        self._unsent: list[memoryview] = []
        self._got = b""

    def begin(self) -> bool:
        """Start the next request; return True if a part of the request could not be sent yet."""
        which = self._number % len(self._requests)
        body = self._requests[which].body(self._sender, self._number)
        self._number += 1
        self._got = b""
        self._unsent = [memoryview(self._heads[which]), memoryview(body)]
        self.began = time.perf_counter()
        return self._send()

    def waits_for(self) -> int:
        """Return the selector's event after which `move` can continue."""
        return selectors.EVENT_WRITE if self._unsent else selectors.EVENT_READ

    def move(self) -> int | None:
        """Send or receive as much as possible; return the status of a complete response. Raises OSError."""
        if self._unsent:
            self._send()
            return None
        piece = self.wire.recv(65536)
        if not piece:
            raise ConnectionError("the server closed the connection before it had sent a response")
        self._got += piece
        head, ended, body = self._got.partition(b"\r\n\r\n")
        if not ended or len(body) < _length(head):
            return None
        return int(head[9:12])

    def _send(self) -> bool:
        try:
            sent = self.wire.sendmsg(self._unsent)
        except BlockingIOError:
            return True
        except OSError:  # the server is gone; `move` raises the error
            self._unsent = []
            return False
        while self._unsent and sent >= len(self._unsent[0]):
            sent -= len(self._unsent.pop(0))
        if self._unsent:
            self._unsent[0] = self._unsent[0][sent:]
        return bool(self._unsent)


def _head(host: str, port: int, headers: str, request: Request) -> bytes:
    body = f"Content-Type: application/json\r\nContent-Length: {len(request.body(0, 0))}\r\n"
    return f"POST {request.path} HTTP/1.1\r\nHost: {host}:{port}\r\n{headers}{body}\r\n".encode()


def _length(head: bytes) -> int:
    match = _LENGTH.search(head)
    return int(match[1]) if match else 0
