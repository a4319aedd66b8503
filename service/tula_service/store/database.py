"""Creates engines for SQLite and Postgres, opens transactions with their repositories, and defines all locks.

**Durability.** A commit returns only after fsync; SQLite runs in WAL mode with full synchronisation.

**Locks** are acquired in the following order. A caller that holds a lock never waits for a lock listed earlier.

1. `Store.fits.turn()`, in this process: only one thread at a time reads, fits and stores; threads that waited take
   the result from the cache. Neither a fit nor a waiting thread holds a connection. Correctness depends only on lock 3.
2. The lock in `Store.transaction()`, in this process and only for SQLite: threads queue for it instead of polling the
   file's write lock, which excludes other processes. SQLite takes the write lock at BEGIN, so that no transaction
   upgrades a read lock.
3. `tx.jobs.lock(job_id)`, in the database: a row lock on Postgres, and the write lock on SQLite. Code that
   stores a plan or a recommendation holds this lock. A transaction that changes a job and its runs first locks the
   job's row, then the rows of the runs, sorted by key. A transaction that stores samples locks the job's row FOR KEY
   SHARE, which blocks only deletions.
4. The lock in `tx.events.append`, only on Postgres: an advisory lock per job, held until commit, which ensures that the
   ids of a job's events increase in commit order.

Transactions from `reading()` take no lock and read from one snapshot (REPEATABLE READ on Postgres).
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
_FULL: Final = "The database's disk is full, and nothing was stored: free some disk space."
LONGEST_STATEMENT_S: Final = 60.0
"""Time limit on Postgres for a statement, and for a pause within a transaction; migrations have no limit."""
_ANSWERS_IN_MEMORY: Final = 256
POOL_SIZE: Final = 16
POOL_TIMEOUT_S: Final = 10.0

_encode = partial(json.dumps, allow_nan=False, separators=(",", ":"))


def utc_now() -> datetime:
    """Return the current time as a timezone-aware datetime in UTC."""
    return datetime.now(timezone.utc)


class Transaction:
    """A transaction with one repository for each kind of object; either all of its writes are stored or none."""

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
    """A thread-safe cache of answers that are not stored in the database, keyed by the question."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bodies: LRUCache[Hashable, str] = LRUCache(_ANSWERS_IN_MEMORY)

    def get(self, key: Hashable) -> str | None:
        """Return the cached answer for this key, or None."""
        with self._lock:
            return self._bodies.get(key)

    def put(self, key: Hashable, body: str) -> None:
        """Cache an answer; if the cache is full, remove the least recently used answer."""
        with self._lock:
            self._bodies[key] = body


class Store:
    """A database with a migrated schema (see `store/migrations.py`). A store is thread-safe, but not fork-safe.

    `transaction()` commits at the end of the block, or rolls back on an exception; `reading()` never writes. Both raise
    StoreUnavailable if the database cannot be reached or remains locked. `fits` runs long computations.
    """

    def __init__(self, engine: sa.Engine, *, now: Clock = utc_now, fits: Fits | None = None) -> None:
        self.engine = engine
        self.now = now
        self._writer_lock: AbstractContextManager[object] = threading.Lock() if is_sqlite(engine) else nullcontext()
        self.of_readers = AnswersInMemory()
        self.fits = fits or Fits()

    @classmethod
    def open(cls, url: str, *, now: Clock = utc_now, connections: int = POOL_SIZE, fits: Fits | None = None) -> Store:
        """Return a store for a database URL or the path of a SQLite file, with at most `connections` connections."""
        return cls(open_engine(url, pool_size=connections), now=now, fits=fits)

    def check_disk(self) -> None:
        """Raise StoreUnavailable if the disk with the SQLite file is full; for Postgres, do nothing."""
        file = self.engine.url.database
        folder = Path(file or ".").expanduser().parent
        if is_sqlite(self.engine) and shutil.disk_usage(folder).free < LEAST_FREE_BYTES:
            raise StoreUnavailable(_FULL)

    def close(self) -> None:
        """Close all connections, and end the process that computes fits, if it was started."""
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
            raise StoreUnavailable("All database connections are in use: retry in a second.") from error
        except sa.exc.DataError as error:
            raise InvalidInput(
                "The database rejected a value in the request: check the text and the numbers in the request."
            ) from error
        except (
            sa.exc.OperationalError,
            sa.exc.InterfaceError,
            sa.exc.InternalError,
        ) as error:  # e.g. a read-only role
            raise StoreUnavailable(why_unavailable(error)) from error


def why_unavailable(error: Exception) -> str:
    """Return a sentence for the user that describes a database driver's error and states that nothing was stored."""
    text = str(error).lower()
    if "disk is full" in text or "no space left" in text:
        return _FULL
    return "The database cannot be reached or is locked, and nothing was stored: retry in a second."


def open_engine(url: str, *, pool_size: int = POOL_SIZE) -> sa.Engine:
    """Return an engine for `sqlite:///PATH`, a bare PATH, or `postgresql+psycopg://...`.

    Raises InvalidInput for any other URL. The engine connects at its first use, and then raises InvalidInput if the
    file is not a database, or if the Postgres database cannot store all Unicode text.
    """
    try:
        parsed = sa.make_url(url if "://" in url else f"sqlite:///{url}")
    except sa.exc.ArgumentError:
        raise InvalidInput("The database URL is malformed: use a file path or postgresql+psycopg://...") from None
    pool: dict[str, Any] = {"pool_size": pool_size, "max_overflow": 0, "pool_timeout": POOL_TIMEOUT_S}
    backend = parsed.get_backend_name()
    if backend == "postgresql":
        engine = sa.create_engine(
            parsed.set(drivername="postgresql+psycopg"),
            json_serializer=_encode,
            **pool,
            pool_use_lifo=True,
            # `_require_utf8` refuses SQL_ASCII databases, from which the driver would read bytes instead of text.
            connect_args={"connect_timeout": 10, "prepare_threshold": 2, "client_encoding": "utf8"},
        )
        sa.event.listen(engine, "connect", _require_utf8)
        sa.event.listen(engine, "connect", _limit_waits)
        return engine
    if backend != "sqlite":
        raise InvalidInput(f"Database {backend!r} is not supported: use SQLite or postgresql+psycopg://...")
    if not parsed.database or parsed.database == ":memory:":
        raise InvalidInput("An in-memory SQLite database cannot be shared by workers and threads: use a file path.")
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
    """Create the database file so that only its owner can access it; SQLite creates its journals with the same mode.

    Raises InvalidInput if the folder does not exist.
    """
    folder = file.parent.expanduser()
    if not folder.is_dir():  # the path may be misspelled
        raise InvalidInput(f"The database's folder {folder} does not exist: create it, or use another path.")
    with contextlib.suppress(OSError):  # the file exists, or SQLite will report why it cannot be opened
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


def is_sqlite(engine: sa.Engine) -> bool:
    """Return True if the engine is for SQLite."""
    return engine.dialect.name == "sqlite"


def _require_utf8(connection: Any, _record: Any) -> None:
    encoding = connection.info.parameter_status("server_encoding")
    if encoding not in ("UTF8", None):  # None from a connection pooler that does not report the encoding
        raise InvalidInput(
            f"The database is encoded as {encoding}, which cannot store all Unicode text: create a database with "
            "CREATE DATABASE name ENCODING 'UTF8' LOCALE 'C' TEMPLATE template0, and use it instead."
        )


def _limit_waits(connection: Any, _record: Any) -> None:
    """Limit the duration of statements and of idle transactions, so that locks cannot be held forever.

    The limits are set with SET statements, since a connection pooler may reject start-up options.
    """
    for name in ("statement_timeout", "idle_in_transaction_session_timeout"):
        connection.execute(f"SET {name} = '{LONGEST_STATEMENT_S:g}s'")
    connection.commit()


def _prepare_sqlite(connection: sqlite3.Connection, _record: Any) -> None:
    connection.isolation_level = None  # the driver must not begin transactions, since `_begin_sqlite` does
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
            raise InvalidInput(
                f"The file given by --database is not a SQLite database ({error}): use another path."
            ) from None


def _begin_sqlite(connection: sa.Connection) -> None:
    writes = connection.get_execution_options().get(WRITES, True)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
