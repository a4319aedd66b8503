"""The background thread that carries measurements to the service, or to disk while the service is away."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from tula_agent.guard import Guard, logger
from tula_agent.ship.envelope import Envelope
from tula_agent.ship.spool import REJECTED, Spool
from tula_agent.ship.transport import Reply, Transport

__all__ = ["Exporter", "backoff_s"]

TRIES_BEFORE_OPEN = 3
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0
QUICK_FOR_S, SLOW_FLUSHES = 30.0, 5
"""A young run is delivered every flush interval; an older one, which nobody watches by the second, less often."""
REJECTED_LIMIT_BYTES = 4 * 2**20
SAVING_SHARE = 0.1
"""Of the time to close: kept for bringing to disk what a service that hangs has not taken."""


def backoff_s(failures: int, jitter: float) -> float:
    """Pause before the next try: doubles up to LONGEST_PAUSE_S, half of it random (`jitter` in 0..1)."""
    longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures - 1, 16))
    return longest * (0.5 + 0.5 * jitter)


class Exporter:
    """A bounded queue, one daemon thread that starts with the first need, and a spool.

    `collect` is called on the thread before each delivery and answers the requests that are due; `on_reply` sees each
    answer. While the service fails the circuit is open: requests go to the spool, and one at a time probes for its
    return. Nothing here ever runs on, waits for, or raises into the training thread, except `close` with its deadline.
    """

    def __init__(
        self,
        connect: Callable[[], Transport],
        collect: Callable[[bool], list[Envelope]],
        spool_path: Path,
        *,
        guard: Guard,
        on_reply: Callable[[Envelope, Reply], None] | None = None,
        idle: Callable[[Transport], None] | None = None,
        flush_interval_s: float = 1.0,
        queue_limit_bytes: int = 4 * 2**20,
        spool_limit_bytes: int = 64 * 2**20,
    ) -> None:
        self.dropped = 0
        self.sent_bytes = 0
        self.cpu_s = 0.0
        self._connect = connect
        self._collect = collect
        self._on_reply = on_reply
        self._idle = idle
        self._guard = guard
        self._interval = flush_interval_s
        self._queue_limit = queue_limit_bytes
        self._queue: deque[Envelope] = deque()
        self._queued_bytes = 0
        self._spool = Spool(spool_path, spool_limit_bytes)
        self._rejected = Spool(spool_path.with_suffix(REJECTED), REJECTED_LIMIT_BYTES)
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._last_words: list[Envelope] = []
        self._closing = False
        self._abandoned = False
        self._thread: threading.Thread | None = None
        self._transport: Transport | None = None
        self._failures = 0
        self._quick_until = time.monotonic() + QUICK_FOR_S
        self._not_before = 0.0  # monotonic: a wall clock may jump

    def start(self) -> None:
        """Start the thread unless it runs."""
        if self._thread is None and not self._closing:
            thread = threading.Thread(target=self._run, name="tula-agent", daemon=True)
            if self._started(thread):
                self._thread = thread

    def _started(self, thread: threading.Thread) -> bool:
        """False where there may be no more threads: too many, or Python 3.12 at its exit."""
        try:
            thread.start()
        except RuntimeError:
            return False
        return True

    def put(self, envelope: Envelope) -> None:
        """Queue a request from any thread; over the bound the oldest go to disk or are counted as dropped."""
        with self._lock:
            self._queue.append(envelope)
            self._queued_bytes += len(envelope.body)
            over = []
            while self._queued_bytes > self._queue_limit and len(self._queue) > 1:
                oldest = self._queue.popleft()
                self._queued_bytes -= len(oldest.body)
                over.append(oldest)
        for oldest in over:
            self._to_disk(oldest)

    def wake(self) -> None:
        """Deliver now rather than at the next interval."""
        self._wake.set()

    def close(self, deadline_s: float, last_words: list[Envelope]) -> None:
        """Deliver what is left and then `last_words`, put the rest on disk, and return: all within `deadline_s`."""
        ends = time.monotonic() + deadline_s
        self.start()
        self._last_words = last_words
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(max(0.0, deadline_s * (1 - SAVING_SHARE)))
        if self._thread is None or self._thread.is_alive():
            self._abandoned = True  # stuck in a request: leave it, and save what it has not sent
            saver = threading.Thread(target=self._save, name="tula-agent-saving", daemon=True)
            if not self._started(saver):
                self._save()
                return
            saver.join(max(0.0, ends - time.monotonic()))
            if saver.is_alive():
                logger.warning("not everything could be kept within %g s: the spool's disk is slow", deadline_s)

    def _save(self) -> None:
        """On a thread of its own too, for a disk can hang like a network."""
        with self._guard("collecting at exit"):
            for envelope in [*self._collect(False), *self._take_last_words()]:
                self.put(envelope)
        self._spool_all()

    def forget(self) -> None:
        """In a forked child: new lock, queue and thread, no connection; what was queued is the parent's to send."""
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._queue = deque()
        self._queued_bytes = 0
        self._thread = None
        self._transport = None
        self._closing = False
        self._failures = 0
        name = f"{self._spool.path.stem}-fork{os.getpid()}{self._spool.path.suffix}"
        self._spool = Spool(self._spool.path.with_name(name), self._spool._limit)
        self._rejected = Spool(self._spool.path.with_suffix(REJECTED), REJECTED_LIMIT_BYTES)

    # What follows runs on the thread.

    def _run(self) -> None:
        while not self._abandoned:
            self._wake.wait(self._interval if time.monotonic() < self._quick_until else SLOW_FLUSHES * self._interval)
            self._wake.clear()
            last = self._closing
            started = time.thread_time()
            with self._guard("shipping"):
                for envelope in self._collect(last):
                    self.put(envelope)
            with self._guard("shipping"):
                for envelope in self._take_last_words() if last else []:
                    self.put(envelope)
                self._deliver(last)
            if last and not self._abandoned:
                self._spool_all()
            self.cpu_s += time.thread_time() - started
            if last:
                break
        transport, self._transport = self._transport, None
        if transport is not None:
            with self._guard("disconnecting"):
                transport.close()

    def _take_last_words(self) -> list[Envelope]:
        words, self._last_words = self._last_words, []
        return words

    def _deliver(self, last: bool) -> None:
        if self._failures >= TRIES_BEFORE_OPEN:
            self._spool_all()
        if not last and time.monotonic() < self._not_before:
            return
        if not self._queue and self._spool.empty and self._idle is None:
            return
        if self._transport is None:
            self._transport = self._connect()
        if not self._spool.empty and not self._replay(last):
            return
        while self._queue and not self._abandoned:
            envelope = self._queue[0]
            if not self._attempt(envelope, last):
                return
            with self._lock:
                if self._queue and self._queue[0] is envelope:
                    self._queue.popleft()
                    self._queued_bytes -= len(envelope.body)
        if self._idle is not None and not last:
            self._idle(self._transport)

    def _replay(self, last: bool) -> bool:
        for envelope in self._spool.envelopes():
            if self._abandoned or not self._attempt(envelope, last):
                return False
        self._spool.clear()
        return True

    def _attempt(self, envelope: Envelope, last: bool) -> bool:
        """True when the request is done with: delivered or refused."""
        while True:
            assert self._transport is not None
            reply = self._transport.send(envelope)
            if reply.verdict != "retry":
                self._failures = 0
                self._settle(envelope, reply)
                return True
            self._failures += 1
            pause = max(backoff_s(self._failures, random.random()), reply.retry_after_s or 0.0)
            self._not_before = time.monotonic() + pause
            if self._failures == TRIES_BEFORE_OPEN:
                logger.warning("the service does not take measurements (%s); they wait on disk", _why(reply))
            if self._failures >= TRIES_BEFORE_OPEN or self._abandoned or (pause > 1.0 and not last) or pause > 2.0:
                return False
            # A new connection: the old one may be what is broken.
            time.sleep(pause)

    def _settle(self, envelope: Envelope, reply: Reply) -> None:
        if reply.verdict == "delivered":
            self.sent_bytes += len(envelope.body)
        else:
            with self._guard("keeping a refused request"):
                kept = self._rejected.append(envelope)
                self.dropped += envelope.values
                where = f"kept in {self._rejected.path}" if kept else "and it could not be kept"
                logger.warning("the service refused %s %s (%s), %s", envelope.method, envelope.path, _why(reply), where)
        if self._on_reply is not None:
            with self._guard("reading an answer"):
                self._on_reply(envelope, reply)

    def _spool_all(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    return
                envelope = self._queue.popleft()
                self._queued_bytes -= len(envelope.body)
            self._to_disk(envelope)

    def _to_disk(self, envelope: Envelope) -> None:
        if not envelope.keep:
            return
        kept = False
        with self._guard("spooling"):
            kept = self._spool.append(envelope)
        if not kept:
            self.dropped += envelope.values


def _why(reply: Reply) -> str:
    return f"{reply.status} {reply.detail}".strip() if reply.status else reply.detail
