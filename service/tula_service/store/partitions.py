"""Creates and drops the monthly telemetry partitions on Postgres; each holds the telemetry of one month's runs.

The key of a run is its month, such as 202611, times 10^9 plus a sequence number (the column's default), so the runs of
a month have a contiguous range of keys. All chunks of a run are in the same partition, even if they arrive late or are
sent again, so the table's primary key (run, rank, boot id, sequence) is sufficient to identify a chunk, and a query for
a run reads only one partition. Partitions are created ahead of time. SQLite has a single table without partitions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Final

import sqlalchemy as sa

from tula_service.errors import Conflict, NotFound, ServiceError, StoreUnavailable
from tula_service.store.archive import Archive
from tula_service.store.database import is_sqlite, why_unavailable
from tula_service.store.tables import jobs, runs
from tula_service.store.telemetry import GONE
from tula_wire.enums import FINAL_STATES

MONTHS_AHEAD: Final = 2
KEYS_OF_A_MONTH: Final = 10**9
_LOCK: Final = 0x74756C62  # only one replica at a time creates partitions
_LOCK_OF_DROPPING: Final = 0x74756C63
_ATTEMPTS: Final = 20

_OF_MONTHS: Final = (
    "FROM pg_class WHERE relname ~ '^telemetry_chunks_[0-9]{6}$' AND relkind = 'r'"
    " AND relnamespace = current_schema()::regnamespace"
)
_TABLES: Final = sa.text(f"SELECT relname, relispartition {_OF_MONTHS} ORDER BY relname")
_MONTHS: Final = sa.text(
    "SELECT to_char((now() AT TIME ZONE 'UTC') + ahead * interval '1 month', 'YYYYMM')"
    f" FROM generate_series(0, {MONTHS_AHEAD}) AS ahead"
)
_NO_PARTITION: Final = "23514"
_OLDEST: Final = f"SELECT min(relname) {_OF_MONTHS} AND relispartition"
"""A query for the table of the first month whose telemetry is still kept."""


def create_ahead(engine: sa.Engine) -> None:
    """Create the missing partitions for this month and the next MONTHS_AHEAD months. Raises StoreUnavailable."""
    if is_sqlite(engine):
        return
    existing = _tables(engine)
    for month in _months(engine):
        if (table := f"telemetry_chunks_{month}") not in existing:
            low, high = month * KEYS_OF_A_MONTH, _following(month) * KEYS_OF_A_MONTH
            part = f"{table} PARTITION OF telemetry_chunks FOR VALUES FROM ({low}) TO ({high})"
            _alter(engine, (f"CREATE TABLE IF NOT EXISTS {part}",), ("runs IN SHARE ROW EXCLUSIVE",))


def check_month(engine: sa.Engine) -> None:
    """Raise StoreUnavailable if there is no partition for the telemetry of new runs."""
    if not is_sqlite(engine) and f"telemetry_chunks_{_months(engine)[0]}" not in _tables(engine):
        raise StoreUnavailable(
            "There is no telemetry partition for this month: make the service's database user the owner of the tables, "
            "then restart the service."
        )


def refusal(engine: sa.Engine, run_key: int, error: sa.exc.IntegrityError) -> ServiceError:
    """Return the error to raise for a chunk that Postgres refused.

    The error is NotFound if the run was deleted or the run's month was dropped, and StoreUnavailable if the run's month
    has no partition yet.
    """
    if getattr(error.orig, "sqlstate", None) != _NO_PARTITION:
        return NotFound(GONE)
    with engine.connect() as connection:
        oldest = connection.exec_driver_sql(_OLDEST).scalar()
    if oldest is not None and run_key < int(oldest.rsplit("_", 1)[1]) * KEYS_OF_A_MONTH:
        return NotFound(GONE)
    return StoreUnavailable("There is no telemetry partition for the month of this run: send the chunk again later.")


def due(engine: sa.Engine, *, before: datetime) -> Sequence[str]:
    """Return the tables of months that ended before `before`, oldest first, up to the first month still in use.

    A month is in use if one of its runs may still send telemetry. The result includes tables that an earlier call of
    `drop` detached but could not drop.
    """
    tables = _tables(engine)
    names = [name for name, attached in tables.items() if not attached]
    with engine.connect() as connection:
        for name in (name for name, attached in tables.items() if attached):
            if _month_end(name) > before.year * 100 + before.month or _in_use(connection, name, before):
                break
            names.append(name)
    return names


@contextmanager
def dropping(engine: sa.Engine) -> Iterator[None]:
    """Hold the lock for dropping months. Raises Conflict if another process holds this lock."""
    # The lock is held outside a transaction, which would be terminated as idle. Postgres also releases the lock when it
    # notices that the connection is closed (if this process is killed), but that is too late for a prune right after.
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.detach()
        if not connection.execute(sa.select(sa.func.pg_try_advisory_lock(_LOCK_OF_DROPPING))).scalar():
            raise Conflict("Another `tula prune --yes` is dropping months of telemetry: wait until it has finished.")
        try:
            yield
        finally:
            with suppress(sa.exc.DBAPIError):  # a broken connection holds no lock, and hides no error of the caller
                connection.execute(sa.select(sa.func.pg_advisory_unlock(_LOCK_OF_DROPPING)))


def drop(engine: sa.Engine, table: str, archive: Archive | None, *, before: datetime | None = None) -> bool:
    """Detach the partition to end all writes to it, write it to the archive, and then drop it.

    If a run of this month may have sent data since `before`, change nothing and return False. If the archive cannot be
    written, the detached table keeps its rows, and `due` will return it again. Raises StoreUnavailable.
    """
    own = f"{table} IN ACCESS EXCLUSIVE"
    if _tables(engine).get(table):
        # The foreign key to `runs` is dropped, so that a concurrent backup, which locks all tables, delays only the
        # final DROP TABLE and no other request.
        keys = (f"DROP CONSTRAINT IF EXISTS fk_{name}_run_key" for name in ("telemetry_chunks", table))
        statements = (
            f"ALTER TABLE telemetry_chunks DETACH PARTITION {table}",
            f"ALTER TABLE {table} {', '.join(keys)}",
        )
        unused = (lambda _: True) if before is None else lambda connection: not _in_use(connection, table, before)
        if not _alter(engine, statements, ("runs IN ACCESS EXCLUSIVE", own), unused):
            return False
    if archive is not None:
        archive.write(engine, table)
    return _alter(engine, (f"DROP TABLE {table}",), (own,))


def _in_use(connection: sa.Connection, table: str, before: datetime) -> bool:
    """Return True if a run of this month or an earlier month has not ended, or ended after `before`.

    Such a run may still send telemetry. A pending run may still start unless its job is archived, and a run whose lease
    has expired continues if its agent reconnects.
    """
    waiting = runs.c.state.not_in(FINAL_STATES) & jobs.c.state.not_in(("archived", "deleting"))
    used = sa.or_(waiting, runs.c.lease_expires_at >= before, runs.c.finished_at >= before)
    of_month = runs.c.key < _month_end(table) * KEYS_OF_A_MONTH
    statement = sa.select(runs.c.key).join(jobs, jobs.c.id == runs.c.job_id).where(of_month, used).limit(1)
    return connection.execute(statement).first() is not None


def _alter(
    engine: sa.Engine,
    statements: Sequence[str],
    locks: Sequence[str],
    allowed: Callable[[sa.Connection], bool] = lambda _: True,
) -> bool:
    """Acquire `locks` in the given order and execute `statements`; return False if `allowed` then forbids the change.

    The timeout for `locks` exceeds one second, since Postgres cancels a vacuum that blocks a lock for that long. The
    timeout for the parent table, which all requests use, is shorter than Postgres's deadlock timeout. If a lock is not
    acquired in time, the whole attempt is repeated.
    """
    waits = ("SET LOCAL lock_timeout = '2s'", "SET LOCAL lock_timeout = '500ms'")
    for attempt in range(_ATTEMPTS):
        try:
            with engine.begin() as connection:
                connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")
                for statement in (waits[0], *(f"LOCK TABLE {table} MODE" for table in locks)):
                    connection.exec_driver_sql(statement)
                if not allowed(connection):
                    return False
                for statement in (waits[1], *statements):
                    connection.exec_driver_sql(statement)
                return True
        except sa.exc.ProgrammingError as error:
            reason = str(error.orig).partition("\n")[0]
            raise StoreUnavailable(
                f"The telemetry partitions cannot be changed ({reason}): make the service's database user the owner of "
                "the tables."
            ) from error
        except sa.exc.OperationalError as error:
            if attempt == _ATTEMPTS - 1:
                raise StoreUnavailable(why_unavailable(error)) from error
            time.sleep(0.5)
    raise AssertionError("the last attempt returns or raises")


def _months(engine: sa.Engine) -> list[int]:
    """Return this month and the next MONTHS_AHEAD months, such as 202611, according to the database's clock.

    The same clock determines the keys of runs.
    """
    with engine.connect() as connection:
        return [int(month) for month in connection.execute(_MONTHS).scalars()]


def _tables(engine: sa.Engine) -> dict[str, bool]:
    """Return the names of the monthly tables, oldest first, each with a flag that is True for an attached partition."""
    with engine.connect() as connection:
        return {str(name): bool(attached) for name, attached in connection.execute(_TABLES)}


def _month_end(table: str) -> int:
    """Return the month that follows a table's month, as a number such as 202612."""
    return _following(int(table.rsplit("_", 1)[1]))


def _following(month: int) -> int:
    return month + 1 if month % 100 < 12 else month + 89
