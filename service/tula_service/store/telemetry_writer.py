"""Group commit for telemetry chunks: all waiting chunks are stored in one transaction and then acknowledged.

The service takes about twice as many chunks as with a transaction per chunk in a thread pool, because requests share
the commit and need no thread. The writer makes few driver calls per group, since after each it competes with the event
loop for the GIL.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import sqlalchemy as sa

from tula_service.errors import Busy, NotFound, ServiceError, StoreUnavailable
from tula_service.store import partitions
from tula_service.store.database import Store, is_sqlite, why_unavailable
from tula_service.store.telemetry import INSERT_POSTGRES, INSERT_SQLITE_IF_THERE, RUN_IS_THERE

MOST_ROWS: Final = 64
MOST_WAITING_BYTES: Final = 64 * 2**20

STUCK_S: Final = 90.0
"""Time in one transaction after which the writer counts as stuck: longer than the database lets a statement take."""

_LOG = logging.getLogger("tula.store")

_Row: TypeAlias = tuple[object, ...]
_Chunk: TypeAlias = tuple[str, _Row]
_Outcome: TypeAlias = bool | ServiceError
_GONE: Final = "The run of this chunk, or the telemetry of its month, was deleted: stop sending for it."
_NOT_MADE: Final = "Telemetry has no partition for the month of this run: send this again later."
_NO_PARTITION: Final = "23514"


class TelemetryWriter:
    """Stores rows of `telemetry.chunk_row` for coroutines; its thread starts with the first row."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._write = self._write_sqlite if is_sqlite(store.engine) else self._write_postgres
        self._waiting: deque[tuple[_Chunk, asyncio.Future[bool]]] = deque()
        self._waiting_bytes = 0
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._connection: Any = None
        self._began: float | None = None

    async def add(self, run_id: str, row: _Row) -> bool:
        """Store a row of the run `run_id` durably; False when it was stored before.

        Raises NotFound if its run was deleted, Busy if too many chunks wait, StoreUnavailable.
        """
        if self._is_stuck():
            self._interrupt()
        loop = asyncio.get_running_loop()
        stored: asyncio.Future[bool] = loop.create_future()
        with self._changed:
            if self._closed:
                raise StoreUnavailable("The service is shutting down: send this again in a second.")
            if self._waiting_bytes > MOST_WAITING_BYTES:
                raise Busy("Telemetry arrives faster than it can be stored: retry in a second.", retry_after_s=1.0)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="tula-telemetry", daemon=True)
                thread.start()  # before the row is queued, because this raises if no thread can be started
                self._thread = thread
            self._waiting.append(((run_id, row), stored))
            self._waiting_bytes += _size(row)
        loop.call_soon(self._notify)  # after the event loop has read all requests that arrived with this one
        return await stored

    def check(self) -> None:
        """Raise StoreUnavailable if the writer is stuck in a transaction; its connection is then cut off."""
        if self._is_stuck():
            self._interrupt()
            raise StoreUnavailable("The writer of telemetry waits for the database: check the database's locks.")

    def _is_stuck(self) -> bool:
        return (began := self._began) is not None and time.monotonic() - began > STUCK_S

    def _interrupt(self) -> None:
        """Shut the socket of a Postgres connection down, which ends the thread's wait as if the server had gone.

        The driver's own cancelling and closing are for the thread that uses the connection.
        """
        if is_sqlite(self._store.engine):
            return
        ended = (OSError, AttributeError, self._store.engine.dialect.loaded_dbapi.Error)  # has just ended by itself
        with contextlib.suppress(*ended), socket.socket(fileno=os.dup(self._connection.fileno())) as wire:
            wire.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Store all waiting chunks, then end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(30)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if not self._waiting:
                    return
                group = [self._waiting.popleft() for _ in range(min(MOST_ROWS, len(self._waiting)))]
                self._waiting_bytes -= sum(_size(row) for (_, row), _ in group)
            outcomes: Sequence[_Outcome]
            self._began = time.monotonic()
            try:
                outcomes = self._write([chunk for chunk, _ in group])
            except Exception as error:
                _LOG.warning("telemetry was not stored", exc_info=True)
                refusal = error if isinstance(error, StoreUnavailable) else StoreUnavailable(why_unavailable(error))
                outcomes = [refusal] * len(group)
            self._began = self._connection = None
            _resolve_all([stored for _, stored in group], outcomes)

    def _write_sqlite(self, chunks: Sequence[_Chunk]) -> list[_Outcome]:
        rows = [(*row, row[0], run_id) for run_id, row in chunks]
        with self._store.transaction() as tx:
            savepoint = tx.connection.begin_nested()
            if tx.connection.exec_driver_sql(INSERT_SQLITE_IF_THERE, rows).rowcount == len(rows):
                return [True] * len(rows)
            savepoint.rollback()  # the count does not say which row is a duplicate: insert one by one
            return [_insert_sqlite(tx.connection, row) for row in rows]

    def _write_postgres(self, chunks: Sequence[_Chunk]) -> list[_Outcome]:
        # In one order, in which rows and the runs they refer to are locked: others insert the same, or delete a run.
        rows = sorted((row for _, row in chunks), key=lambda row: row[:4])
        columns = tuple(list(column) for column in zip(*rows, strict=True))
        try:
            with self._store.transaction() as tx:
                self._connection = tx.connection.connection.driver_connection
                new = set(map(tuple, tx.connection.exec_driver_sql(INSERT_POSTGRES, columns)))
        except sa.exc.IntegrityError as error:
            self._connection = None  # it is back in the pool, from which another thread may have taken it
            if len(chunks) == 1:
                return [self._why_refused(rows[0], error)]
            return [self._write_postgres([chunk])[0] for chunk in chunks]
        outcomes: list[_Outcome] = []
        for _, row in chunks:
            outcomes.append(row[:4] in new)
            new.discard(row[:4])  # the same chunk again in this group is a duplicate
        return outcomes

    def _why_refused(self, row: _Row, error: sa.exc.IntegrityError) -> ServiceError:
        """The run is gone, or the partition of its month: dropped, or not yet made, after which the chunk is taken."""
        if getattr(error.orig, "sqlstate", None) != _NO_PARTITION:
            return NotFound(_GONE)
        with self._store.reading() as tx:
            oldest = tx.connection.exec_driver_sql(partitions.OLDEST).scalar()
        dropped = partitions.is_before(int(str(row[0])), oldest)
        return NotFound(_GONE) if dropped else StoreUnavailable(_NOT_MADE)


def _insert_sqlite(connection: sa.Connection, row: _Row) -> _Outcome:
    if connection.exec_driver_sql(INSERT_SQLITE_IF_THERE, row).rowcount == 1:
        return True
    return NotFound(_GONE) if connection.exec_driver_sql(RUN_IS_THERE, row[-2:]).first() is None else False


def _size(row: _Row) -> int:
    payload = row[-1]
    return len(payload) if isinstance(payload, bytes) else 0


def _resolve_all(waiting: Sequence[asyncio.Future[bool]], outcomes: Sequence[_Outcome]) -> None:
    """Wake the coroutines, with one call per event loop; a service has one, tests may have several."""
    for loop in {stored.get_loop() for stored in waiting}:
        mine = [place for place, stored in enumerate(waiting) if stored.get_loop() is loop]
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(_resolve, [waiting[at] for at in mine], [outcomes[at] for at in mine])


def _resolve(waiting: Sequence[asyncio.Future[bool]], outcomes: Sequence[_Outcome]) -> None:
    for stored, outcome in zip(waiting, outcomes, strict=True):
        if stored.done():  # the client disconnected; its chunk is stored
            continue
        if isinstance(outcome, ServiceError):
            stored.set_exception(outcome)
        else:
            stored.set_result(outcome)
