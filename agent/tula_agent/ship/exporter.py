"""Runs the background thread that sends measurements to the service, or to disk while the service is unavailable."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tula_agent.guard import Guard, logger
from tula_agent.readings import take
from tula_agent.ship.spool import Spool, SpooledRequest
from tula_agent.ship.transport import Reply, Transport
from tula_wire.retry import backoff_s

_JITTER = random.Random()
"""A private generator, so that the agent does not change the state of the script's global generator."""
TRIES_BEFORE_OPEN = 3
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0
FLUSH_INTERVAL_S, QUICK_FOR_S, SLOW_FLUSHES = 1.0, 30.0, 10
"""A run sends at every flush interval for `QUICK_FOR_S` seconds, and then once every `SLOW_FLUSHES` intervals."""
QUEUE_LIMIT = 100
"""Maximum number of requests in memory, which is enough for one or two minutes.

`Readings` limits the measurements that are not part of a request yet.
"""
_TOKENS_FAULT = (401, 403)
"""Statuses for an unknown token or another job's token; a different token, such as that of `tula upload`, may work."""
SAVING_SHARE = 0.1
"""Fraction of the closing deadline that is reserved for writing to disk if the service hangs."""


class Exporter:
    """Sends requests from a bounded queue and from a spool on disk, on a daemon thread that starts on first use.

    The thread calls `collect` before each delivery to get the requests that are due, `on_reply` with each reply, and
    `poll` after each delivery, with True after the last one. While the service fails, the circuit is open: requests go
    to the spool, and single requests test whether the service is available again. The training thread waits for the
    exporter only in `flush` and `close`, which have time limits.
    """

    def __init__(
        self,
        connect: Callable[[], Transport],
        collect: Callable[[bool], list[SpooledRequest]],
        spool_path: Path,
        *,
        guard: Guard,
        lease: int | None = None,
        on_reply: Callable[[SpooledRequest, Reply], None] | None = None,
        poll: Callable[[Transport, bool], None] | None = None,
        queue_limit: int = QUEUE_LIMIT,
        spool_limit_bytes: int = 64 * 2**20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.dropped = 0
        self._connect = connect
        self._collect = collect
        self._lease = lease
        self._on_reply = on_reply
        self._poll = poll
        self._guard = guard
        self.queue_limit = queue_limit
        self._finals: deque[Callable[[], list[SpooledRequest]]] = deque()
        self._flushes: deque[threading.Event] = deque()
        self._abandoned = False
        self._clock = clock
        self._quick_until = clock() + QUICK_FOR_S
        self._not_before = 0.0
        self._wake = threading.Event()
        self._queue: deque[SpooledRequest] = deque()
        self._sending: SpooledRequest | None = None
        self._spool = Spool(spool_path, spool_limit_bytes)
        self._refusals: set[int] = set()  # statuses that have been logged
        self._thread: threading.Thread | None = None
        self._transport: Transport | None = None
        self._closing = False
        self._failures = 0

    def start(self) -> None:
        """Start the thread unless it is running."""
        if self._thread is None and not self._closing:
            self._thread = _started(self._run, "tula-agent")

    def put(self, request: SpooledRequest) -> None:
        """Queue a request from any thread; if the queue is full, write the oldest requests to disk or count them as
        dropped.
        """
        self._queue.append(replace(request, lease=self._lease))
        with suppress(IndexError):  # another thread has emptied the queue
            while len(self._queue) > self.queue_limit:
                self._to_disk(self._queue.popleft())

    def wake(self) -> None:
        """Make the thread deliver requests now instead of at the next interval."""
        self._wake.set()

    def flush(self, within_s: float) -> None:
        """Wait up to `within_s` seconds until all measurements so far are sent or on disk, since the process may end
        soon.
        """
        done = threading.Event()
        self._flushes.append(done)
        self.wake()
        if self._thread is not None:
            done.wait(within_s)

    def close(self, deadline_s: float, final: Callable[[], list[SpooledRequest]]) -> None:
        """Deliver the queue and the requests that `final` returns, and write undelivered requests to disk, all within
        `deadline_s` seconds.
        """
        ends = time.monotonic() + deadline_s
        self.start()
        self._finals.append(final)
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(max(0.0, deadline_s * (1 - SAVING_SHARE)))
        if self._thread is None or self._thread.is_alive():
            self._abandoned = True  # the thread is stuck in a request, so save unsent requests without it
            saver = _started(self._save, "tula-agent-saving")
            if saver is None:
                self._save()
                return
            saver.join(max(0.0, ends - time.monotonic()))
            if saver.is_alive():
                logger.warning(
                    "some requests were not written to the spool within %g s, because the disk is slow", deadline_s
                )

    def _save(self) -> None:
        """Save unsent requests; runs on a separate thread, since writing to a disk can hang."""
        self._put_due(False, final=True)
        self._spool_all()

    def _put_due(self, last: bool, final: bool) -> None:
        """Queue due requests and, if `final` is True, the final report, even if other requests can't be collected."""
        with self._guard("shipping"):
            for request in self._collect(last):
                self.put(request)
        with self._guard("shipping"):
            for request in [request for due in take(self._finals) for request in due()] if final else []:
                self.put(request)

    # The following methods run on the shipping thread.

    def _run(self) -> None:
        while not self._abandoned:
            self._wake.wait(FLUSH_INTERVAL_S if self._clock() < self._quick_until else SLOW_FLUSHES * FLUSH_INTERVAL_S)
            self._wake.clear()
            last, flushes = self._closing, take(self._flushes)
            now = last or bool(flushes)
            self._put_due(now, final=last)
            with self._guard("shipping"):
                self.deliver(now)
            if now and not self._abandoned:
                self._spool_all()
            for done in flushes:
                done.set()
            if last:
                break
        transport, self._transport = self._transport, None
        if transport is not None:
            with self._guard("disconnecting"):
                transport.close()

    def deliver(self, last: bool = False) -> None:
        """Deliver the requests on disk and then those in the queue; if `last` is True, do so even during a pause."""
        if self._failures >= TRIES_BEFORE_OPEN:
            self._spool_all()
        if not last and self._clock() < self._not_before:
            return
        if not self._queue and self._spool.empty and self._poll is None:
            return
        if self._transport is None:
            self._transport = self._connect()
        if not self._spool.empty and not self._replay(last):
            return
        while self._queue and not self._abandoned:
            request = self._sending = self._queue.popleft()
            taken = False
            try:
                taken = self._attempt(request, last)
            finally:
                if not taken:
                    self._queue.appendleft(request)
                self._sending = None  # only now, so that `_save` always finds the request
            if not taken:
                return
        if self._poll is not None:
            self._poll(self._transport, last)

    def _replay(self, last: bool) -> bool:
        size = self._spool.size
        for request in self._spool.requests():
            if self._abandoned or not self._attempt(request, last):
                return False
        if self._spool.size == size and not self._abandoned:  # otherwise, another thread has added requests
            self._spool.clear()
        return self._spool.empty

    def _attempt(self, request: SpooledRequest, last: bool) -> bool:
        """Send a request, with retries; return True if it was delivered or refused."""
        while True:
            assert self._transport is not None
            reply = self._transport.send(request)
            if reply.verdict != "retry" and reply.status not in _TOKENS_FAULT:
                self._failures = 0
                self._count_outcome(request, reply)
                return True
            self._failures += 1
            pause = pause_s(self._failures, reply)
            self._not_before = self._clock() + pause
            if self._failures == TRIES_BEFORE_OPEN:
                logger.warning(
                    "the service does not accept measurements (%s), so they are stored on disk", _reason(reply)
                )
            if self._failures >= TRIES_BEFORE_OPEN or self._abandoned or (pause > 1.0 and not last) or pause > 2.0:
                return False
            time.sleep(pause)

    def _count_outcome(self, request: SpooledRequest, reply: Reply) -> None:
        if reply.verdict == "refused":
            self.dropped += request.values
            if reply.status not in self._refusals:
                self._refusals.add(reply.status)
                logger.warning("the service refused %s %s (%s)", request.method, request.path, _reason(reply))
        if self._on_reply is not None:
            with self._guard("processing a reply"):
                self._on_reply(request, reply)

    def _spool_all(self) -> None:
        if (sending := self._sending) is not None:  # a request that hangs at the end; it may be sent twice
            self._to_disk(sending)
        for request in take(self._queue):
            self._to_disk(request)

    def _to_disk(self, request: SpooledRequest) -> None:
        if not request.keep:
            return
        kept = False
        with self._guard("spooling"):
            kept = self._spool.append(request)
        if not kept:
            self.dropped += request.values


def pause_s(failures: int, reply: Reply) -> float:
    """Return the number of seconds to wait after `failures` failures, the last of which was `reply`."""
    bounds = {"base_s": FIRST_PAUSE_S, "cap_s": LONGEST_PAUSE_S}
    return backoff_s(failures, _JITTER.random(), **bounds, asked_s=reply.retry_after_s)


def _started(target: Callable[[], None], name: str) -> threading.Thread | None:
    """Return a new daemon thread, or None if Python cannot start it (too many threads, or Python 3.12 during exit)."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


def _reason(reply: Reply) -> str:
    return f"{reply.status} {reply.detail}".strip() if reply.status else reply.detail
