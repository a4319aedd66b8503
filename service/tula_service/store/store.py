"""The store: one transaction at a time, with a repository for each noun."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import datetime, timezone

import sqlalchemy as sa

from tula_service.errors import Busy, InvalidInput, StoreUnavailable
from tula_service.store._base import Clock
from tula_service.store.access import Audit, Projects, Tokens
from tula_service.store.chunks import Chunks
from tula_service.store.engine import POOL_SIZE, WRITES, is_sqlite, open_engine
from tula_service.store.events import Events
from tula_service.store.fits import Fits, Scaling
from tula_service.store.jobs import Jobs
from tula_service.store.ledger import Ledger
from tula_service.store.runs import Runs
from tula_service.store.sample_pages import SamplePages
from tula_service.store.samples import Samples

__all__ = ["COMPUTING_AT_ONCE", "Store", "Transaction", "utc_now"]

COMPUTING_AT_ONCE = 2
"""Fits that one process works on at once. They share one interpreter, so that more of them would not end sooner, and
whoever takes requests in would wait for its turn among all of them."""

_LONGEST_QUEUE_S = 15.0
_ALONE = 64
"""Locks that all jobs share: two that meet on one wait for each other without need, which costs a fit's time."""


def utc_now() -> datetime:
    """The present moment, aware."""
    return datetime.now(timezone.utc)


class Transaction:
    """Everything in it is stored together or not at all."""

    def __init__(self, connection: sa.Connection, now: Clock, *, writable: bool) -> None:
        self.connection = connection
        self.now = now
        self.jobs = Jobs(connection, now)
        self.runs = Runs(connection, now)
        self.samples = Samples(connection, now, writable=writable)
        self.sample_pages = SamplePages(connection, now)
        self.chunks = Chunks(connection, now)
        self.ledger = Ledger(connection, now)
        self.fits = Fits(connection, now)
        self.scaling = Scaling(connection, now)
        self.events = Events(connection, now)
        self.projects = Projects(connection, now)
        self.tokens = Tokens(connection, now)
        self.audit = Audit(connection, now)


class Store:
    """A database with a migrated schema (see `store/schema.py`); safe to share between threads, not over a fork.

    `transaction()` commits on leaving the block and rolls back on an exception; `reading()` never writes. Both raise
    StoreUnavailable when the database cannot be reached or stays locked. `computing()` is reading for long arithmetic.
    """

    def __init__(self, engine: sa.Engine, *, now: Clock = utc_now) -> None:
        self.engine = engine
        self.now = now
        # SQLite has one writer. Threads of one process queue here, fairly, instead of polling the file's lock; between
        # processes the file's own lock decides, so nothing depends on this one.
        self._turn: AbstractContextManager[object] = threading.Lock() if is_sqlite(engine) else nullcontext()
        self._computing = threading.BoundedSemaphore(COMPUTING_AT_ONCE)
        self._alone = [threading.Lock() for _ in range(_ALONE)]

    @classmethod
    def open(cls, url: str, *, now: Clock = utc_now, connections: int = POOL_SIZE) -> Store:
        """The store behind a database URL or a SQLite file's path, with at most so many connections."""
        return cls(open_engine(url, pool_size=connections), now=now)

    def close(self) -> None:
        """Give all connections back."""
        self.engine.dispose()

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """A transaction that may write."""
        with self._turn, self._begin(writes=True) as tx:
            yield tx

    def turn(self) -> AbstractContextManager[object]:
        """What a writer that brings its own driver connection holds meanwhile, so that it takes its turn too."""
        return self._turn

    @contextmanager
    def reading(self) -> Iterator[Transaction]:
        """A transaction that only reads: on SQLite it waits for nobody."""
        with self._begin(writes=False) as tx:
            yield tx

    @contextmanager
    def computing(self) -> Iterator[Transaction]:
        """Reading for fits and searches, of which few run at once; the others wait here and hold no connection.

        Raises Busy when too many were before this one.
        """
        with _queued(self._computing), self.reading() as tx:
            yield tx

    @contextmanager
    def alone(self, job_id: str) -> Iterator[None]:
        """Nobody else in this process works out the same for this job: from reading to having written what was found.

        For what is found once and then found done; to be right, it needs the job's lock. Raises Busy as `computing`.
        """
        with _queued(self._alone[hash(job_id) % _ALONE]):
            yield

    @contextmanager
    def _begin(self, *, writes: bool) -> Iterator[Transaction]:
        try:
            with self.engine.connect() as connection:
                connection = connection.execution_options(**{WRITES: writes})
                with connection.begin():
                    yield Transaction(connection, self.now, writable=writes)
        except sa.exc.TimeoutError as error:
            raise StoreUnavailable("All database connections are in use: try again in a second.") from error
        except sa.exc.DataError as error:
            raise InvalidInput("The request holds a value that no column can: check its texts and numbers.") from error
        except (sa.exc.OperationalError, sa.exc.InterfaceError) as error:
            raise StoreUnavailable(
                "The database cannot be reached or is locked; nothing was stored: try again in a second."
            ) from error


@contextmanager
def _queued(lock: threading.BoundedSemaphore | threading.Lock) -> Iterator[None]:
    if not lock.acquire(timeout=_LONGEST_QUEUE_S):
        raise Busy("More fits are asked for than can be computed: ask again, or less often.", retry_after_s=5.0)
    try:
        yield
    finally:
        lock.release()
