"""The database: engines for SQLite and Postgres, transactions with one repository for each noun, and all locks.

**Durability.** A commit returns after fsync: SQLite runs in WAL mode with full synchronisation.

**Locks** are taken in this order; a caller that holds one never waits for an earlier one.

1. `Store.fits.turn()`, in this process: one thread at a time reads, fits and stores, and threads that waited get its
result from the cache. Neither a fit nor a waiting thread holds a connection. Correctness depends only on 3. 2. The lock
of `Store.transaction()`, in this process, SQLite only: threads queue here, fairly, instead of polling the
   file's write lock, which decides between processes. SQLite takes the write lock at BEGIN, so that no transaction
   upgrades a read lock.
3. `tx.jobs.lock(job_id)`, in the database: a row lock on Postgres, the write lock on SQLite. Planning and publishing
   hold it. A transaction that changes a job and its runs takes the job's row first, then its runs by key; a transaction
   that stores samples locks the job's row FOR KEY SHARE, which only a deletion waits for.
4. `tx.events.append`, Postgres only: an advisory lock per job, held until commit, so that the ids of a job's events
   grow in commit order.

Transactions from `reading()` take no lock and see one snapshot (REPEATABLE READ on Postgres).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import threading
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
from cachetools import LRUCache

from tula_service.errors import InvalidInput, StoreUnavailable
from tula_service.fits import Fits
from tula_service.store._base import WRITES, Clock
from tula_service.store.access import Audit, Projects, Sessions, Tokens
from tula_service.store.events import Events
from tula_service.store.fabrics import Fabrics
from tula_service.store.jobs import Jobs
from tula_service.store.ledger import Ledger, PosteriorStore
from tula_service.store.recommendations import AnswerCache
from tula_service.store.runs import Leases, Runs
from tula_service.store.samples import Samples
from tula_service.store.scaling import Scaling
from tula_service.store.telemetry import Telemetry

BUSY_TIMEOUT_S: Final = 15.0
LEAST_FREE_BYTES: Final = 2**20
_FULL: Final = "The disk of the database is full; nothing was stored: free some space."
LONGEST_STATEMENT_S: Final = 60.0
"""Longest statement, and longest pause within a transaction, on Postgres, except in migrations."""
_ANSWERS_IN_MEMORY: Final = 256
POOL_SIZE: Final = 16
POOL_TIMEOUT_S: Final = 10.0

_encode = partial(json.dumps, allow_nan=False, separators=(",", ":"))


def utc_now() -> datetime:
    """Return the current time in UTC, with its time zone."""
    return datetime.now(timezone.utc)


class Transaction:
    """A transaction with one repository for each noun; its writes are stored together or not at all."""

    def __init__(self, connection: sa.Connection, now: Clock) -> None:
        self.connection = connection
        self.now = now
        self.jobs = Jobs(connection, now)
        self.runs = Runs(connection, now)
        self.leases = Leases(connection, now)
        self.samples = Samples(connection, now)
        self.telemetry = Telemetry(connection, now)
        self.ledger = Ledger(connection, now)
        self.answers = AnswerCache(connection, now)
        self.posteriors = PosteriorStore(connection, now)
        self.fabrics = Fabrics(connection, now)
        self.scaling = Scaling(connection, now)
        self.events = Events(connection, now)
        self.projects = Projects(connection, now)
        self.tokens = Tokens(connection, now)
        self.sessions = Sessions(connection, now)
        self.audit = Audit(connection, now)


class AnswersInMemory:
    """A cache of answers that are not stored in the database, keyed by their question; threads share an instance."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bodies: LRUCache[Hashable, str] = LRUCache(_ANSWERS_IN_MEMORY)

    def get(self, key: Hashable) -> str | None:
        """Return the answer to a question, or None if it is not cached."""
        with self._lock:
            return self._bodies.get(key)

    def put(self, key: Hashable, body: str) -> None:
        """Cache an answer; if there is no room, drop the least recently used one."""
        with self._lock:
            self._bodies[key] = body


class Store:
    """A database with a migrated schema (see `store/migrations.py`); thread-safe, but not fork-safe.

    `transaction()` commits on leaving the block and rolls back on an exception; `reading()` never writes. Both raise
    StoreUnavailable if the database cannot be reached or stays locked. `fits` runs long computations.
    """

    def __init__(self, engine: sa.Engine, *, now: Clock = utc_now, fits: Fits | None = None) -> None:
        self.engine = engine
        self.now = now
        self._writer_lock: AbstractContextManager[object] = threading.Lock() if is_sqlite(engine) else nullcontext()
        self.of_readers = AnswersInMemory()
        self.fits = fits or Fits()

    @classmethod
    def open(cls, url: str, *, now: Clock = utc_now, connections: int = POOL_SIZE, fits: Fits | None = None) -> Store:
        """Return the store behind a database URL or a SQLite file's path, with at most this many connections."""
        return cls(open_engine(url, pool_size=connections), now=now, fits=fits)

    def check_disk(self) -> None:
        """Raise StoreUnavailable if the disk of a SQLite file is full; a database server monitors its own disk."""
        file = self.engine.url.database
        folder = Path(file or ".").expanduser().parent
        if is_sqlite(self.engine) and shutil.disk_usage(folder).free < LEAST_FREE_BYTES:
            raise StoreUnavailable(_FULL)

    def close(self) -> None:
        """Close all connections, and end the process that computes fits if there is one."""
        self.fits.close()
        self.engine.dispose()

    def transaction(self) -> AbstractContextManager[Transaction]:
        """Return a transaction that may write."""
        return self._begin(self._writer_lock, writes=True)

    def reading(self) -> AbstractContextManager[Transaction]:
        """Return a transaction that only reads, from a single snapshot."""
        return self._begin(nullcontext(), writes=False)

    @contextmanager
    def _begin(self, lock: AbstractContextManager[object], *, writes: bool) -> Iterator[Transaction]:
        try:
            with lock, self.engine.connect() as connection:
                options: dict[str, Any] = {WRITES: writes}
                if not writes and not is_sqlite(self.engine):
                    options["isolation_level"] = "REPEATABLE READ"
                connection = connection.execution_options(**options)
                with connection.begin():
                    yield Transaction(connection, self.now)
        except sa.exc.TimeoutError as error:
            raise StoreUnavailable("All database connections are in use: try again in a second.") from error
        except sa.exc.DataError as error:
            raise InvalidInput(
                "A value in the request does not fit its column: check its texts and numbers."
            ) from error
        except (
            sa.exc.OperationalError,
            sa.exc.InterfaceError,
            sa.exc.InternalError,
        ) as error:  # a read-only role
            raise StoreUnavailable(why_unavailable(error)) from error


def why_unavailable(error: Exception) -> str:
    """Return a sentence about a driver's error that also says that nothing was stored."""
    text = str(error).lower()
    if "disk is full" in text or "no space left" in text:
        return _FULL
    return "The database cannot be reached or is locked; nothing was stored: try again in a second."


def open_engine(url: str, *, pool_size: int = POOL_SIZE) -> sa.Engine:
    """Return an engine for `sqlite:///PATH`, a bare PATH, or `postgresql+psycopg://...`.

    Raises InvalidInput for any other URL. The engine connects when it is first used, and then raises InvalidInput for a
    file that is not a database, and for a Postgres database that cannot store all Unicode text.
    """
    try:
        parsed = sa.make_url(url if "://" in url else f"sqlite:///{url}")
    except sa.exc.ArgumentError:
        raise InvalidInput("The database URL cannot be read: give a file path or postgresql+psycopg://...") from None
    pool: dict[str, Any] = {"pool_size": pool_size, "max_overflow": 0, "pool_timeout": POOL_TIMEOUT_S}
    backend = parsed.get_backend_name()
    if backend == "postgresql":
        engine = sa.create_engine(
            parsed.set(drivername="postgresql+psycopg"),
            json_serializer=_encode,
            **pool,
            pool_use_lifo=True,
            # From an SQL_ASCII database, the driver would read bytes instead of text, so `_require_utf8` refuses it.
            connect_args={"connect_timeout": 10, "prepare_threshold": 2, "client_encoding": "utf8"},
        )
        sa.event.listen(engine, "connect", _require_utf8)
        sa.event.listen(engine, "connect", _limit_waits)
        return engine
    if backend != "sqlite":
        raise InvalidInput(f"Database {backend!r} is not supported: use SQLite or postgresql+psycopg://...")
    if not parsed.database or parsed.database == ":memory:":
        raise InvalidInput("SQLite needs a file, since every worker and thread opens its own connection: give a path.")
    _make_private(Path(parsed.database))
    engine = sa.create_engine(
        parsed,
        json_serializer=_encode,
        poolclass=sa.pool.QueuePool,
        **pool,
        connect_args={"timeout": BUSY_TIMEOUT_S, "check_same_thread": False},
    )
    sa.event.listen(engine, "connect", _prepare_sqlite)
    sa.event.listen(engine, "begin", _begin_sqlite)
    return engine


def _make_private(file: Path) -> None:
    """Create the file for its owner only; SQLite's journals get the same mode.

    Raises InvalidInput if the folder is missing.
    """
    folder = file.parent.expanduser()
    if not folder.is_dir():  # the path may hold a typing error
        raise InvalidInput(f"The folder {folder} of the database does not exist: make it, or give another path.")
    with contextlib.suppress(OSError):  # it exists, or SQLite says why it cannot be opened
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


def is_sqlite(engine: sa.Engine) -> bool:
    """Return True if the engine is for SQLite."""
    return engine.dialect.name == "sqlite"


def _require_utf8(connection: Any, _record: Any) -> None:
    encoding = connection.info.parameter_status("server_encoding")
    if encoding not in ("UTF8", None):  # a connection pooler may not report it
        raise InvalidInput(
            f"The database is encoded as {encoding}, which cannot hold every text: create another with "
            "CREATE DATABASE name ENCODING 'UTF8' LOCALE 'C' TEMPLATE template0, and use that."
        )


def _limit_waits(connection: Any, _record: Any) -> None:
    """Limit the duration of statements and idle transactions, so that neither holds its locks forever.

    The limits are set by statements rather than start-up options, which a connection pooler may refuse.
    """
    for name in ("statement_timeout", "idle_in_transaction_session_timeout"):
        connection.execute(f"SET {name} = '{LONGEST_STATEMENT_S:g}s'")
    connection.commit()


def _prepare_sqlite(connection: sqlite3.Connection, _record: Any) -> None:
    connection.isolation_level = None  # the driver begins no transaction by itself; `_begin_sqlite` does
    for pragma in (
        "journal_mode=WAL",
        "synchronous=FULL",
        "foreign_keys=ON",
        "journal_size_limit=67108864",
        "wal_autocheckpoint=4000",
        "cache_size=-32768",
        "temp_store=MEMORY",
        "secure_delete=OFF",
    ):
        try:
            connection.execute(f"PRAGMA {pragma}").close()
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_NOTADB:
                raise
            raise InvalidInput(f"--database is not a SQLite database: give another path ({error}).") from None


def _begin_sqlite(connection: sa.Connection) -> None:
    writes = connection.get_execution_options().get(WRITES, True)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
