"""Partitions of telemetry on Postgres: one for the runs that began in a month, made ahead and dropped whole.

The key of a run is its month, such as 202611, times 10^9 plus a running number (the column's default). A month is so a
range of run keys. All chunks of a run lie in one partition, however late they arrive or are sent again, so that the
table's primary key (run, rank, boot id, sequence) still identifies a chunk, and a query for a run reads one partition.
Runs from before there were partitions are in the first. SQLite has one table, and nothing to do here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from typing import Final

import sqlalchemy as sa

from tula_service.errors import StoreUnavailable
from tula_service.store.archive import Archive
from tula_service.store.database import is_sqlite, why_unavailable
from tula_service.store.tables import runs

MONTHS_AHEAD: Final = 2
KEYS_OF_A_MONTH: Final = 10**9
_LOCK: Final = 0x74756C62  # replicas make partitions one after another
_ATTEMPTS: Final = 20
_NO_KEY: Final = 2**63

_TABLES: Final = sa.text(
    "SELECT relname, relispartition FROM pg_class WHERE relname ~ '^telemetry_chunks_[0-9]{6}$' AND relkind = 'r'"
    " AND relnamespace = current_schema()::regnamespace ORDER BY relname"
)
_MONTHS: Final = sa.text(
    "SELECT to_char((now() AT TIME ZONE 'UTC') + ahead * interval '1 month', 'YYYYMM')"
    f" FROM generate_series(0, {MONTHS_AHEAD}) AS ahead"
)


def create_ahead(engine: sa.Engine) -> None:
    """Make the partitions of this month and the next ones that are missing. Raises StoreUnavailable."""
    if is_sqlite(engine):
        return
    existing = _tables(engine)
    with engine.connect() as connection:
        months = [int(month) for month in connection.execute(_MONTHS).scalars()]
    for month in months:
        if (table := f"telemetry_chunks_{month}") not in existing:
            low, high = month * KEYS_OF_A_MONTH, _following(month) * KEYS_OF_A_MONTH
            _alter(
                engine,
                f"CREATE TABLE IF NOT EXISTS {table} PARTITION OF telemetry_chunks FOR VALUES FROM ({low}) TO ({high})",
            )


def due(engine: sa.Engine, *, before: datetime, now: datetime) -> Sequence[str]:
    """The tables of months that ended before `before`, oldest first, up to the first with a run under a lease.

    With those that an earlier `drop` has detached and could not finish.
    """
    tables = _tables(engine)
    with engine.connect() as connection:
        leased = connection.execute(sa.select(sa.func.min(runs.c.key)).where(runs.c.lease_expires_at >= now)).scalar()
    found = [name for name, attached in tables.items() if not attached]
    for name in (name for name, attached in tables.items() if attached):
        following = _following(int(name.rsplit("_", 1)[1]))  # where it begins, the month ends
        if following > before.year * 100 + before.month or (leased or _NO_KEY) < following * KEYS_OF_A_MONTH:
            break
        found.append(name)
    return found


def drop(engine: sa.Engine, table: str, archive: Archive | None) -> None:
    """Detach the partition, which ends all writing to it, write it to the archive, and only then drop it.

    When the archive fails, the detached table keeps its rows, and `due` names it again. Raises StoreUnavailable.
    """
    if _tables(engine).get(table):
        _alter(engine, f"ALTER TABLE telemetry_chunks DETACH PARTITION {table}", table)
    if archive is not None:
        archive.write(engine, table)
    _alter(engine, f"DROP TABLE {table}", table, runs_mode="ACCESS EXCLUSIVE")


def _alter(engine: sa.Engine, statement: str, *tables: str, runs_mode: str = "SHARE ROW EXCLUSIVE") -> None:
    """Change tables that are in use, after `runs` and `tables` are locked in this order.

    These waits last longer than the second after which Postgres stops its own vacuum for them; that for the parent,
    which all requests use, ends before Postgres would end one of those for a deadlock. Each is tried again.
    """
    locks = [
        f"LOCK TABLE runs IN {runs_mode} MODE",
        *(f"LOCK TABLE {each} IN ACCESS EXCLUSIVE MODE" for each in tables),
    ]
    waits = ("SET LOCAL lock_timeout = '2s'", "SET LOCAL lock_timeout = '500ms'")
    for attempt in range(_ATTEMPTS):
        try:
            with engine.begin() as connection:
                connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")
                for each in (waits[0], *locks, waits[1], statement):
                    connection.exec_driver_sql(each)
        except sa.exc.OperationalError as error:
            if attempt == _ATTEMPTS - 1:
                raise StoreUnavailable(why_unavailable(error)) from error
            time.sleep(0.5)
        else:
            return


def _tables(engine: sa.Engine) -> dict[str, bool]:
    """The tables of months in their order, each with whether it is attached."""
    with engine.connect() as connection:
        return {str(name): bool(attached) for name, attached in connection.execute(_TABLES)}


def _following(month: int) -> int:
    return month + 1 if month % 100 < 12 else month + 89
