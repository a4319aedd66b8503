"""The base of every repository: one connection inside one transaction, and a clock."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import fields
from datetime import datetime
from typing import Any, Final, TypeAlias

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from tula_service.store.tables import jobs, runs

Clock: TypeAlias = Callable[[], datetime]
RowMap: TypeAlias = sa.RowMapping
WRITES: Final = "tula_writes"
"""Execution option of transactions that will write, so that SQLite takes its write lock at the start."""
_BUMP: Final = sa.update(jobs).where(jobs.c.id == sa.bindparam("job")).values(data_version=jobs.c.data_version + 1)


class Repository:
    """Access to some tables through one transaction's connection.

    A statement that every request from an agent executes is a module constant with named parameters, since SQLAlchemy
    takes longer to build a statement and find it in its cache than the database takes to answer it.
    """

    def __init__(self, connection: sa.Connection, now: Clock) -> None:
        self._connection = connection
        self._now = now

    @property
    def _postgres(self) -> bool:
        return self._connection.dialect.name == "postgresql"

    def _rows(self, statement: sa.Executable) -> list[RowMap]:
        return list(self._connection.execute(statement).mappings())

    def _row(self, statement: sa.Executable, **parameters: object) -> RowMap | None:
        return self._connection.execute(statement, parameters).mappings().first()

    def _scalar(self, statement: sa.Executable, **parameters: object) -> Any:
        return self._connection.execute(statement, parameters).scalar()

    def bump(self, job_id: str) -> None:
        """Increment the job's data version, because something that a fit reads has changed."""
        self._connection.execute(_BUMP, {"job": job_id})

    def _purge(self, table: sa.Table, job_id: str, limit: int) -> int:
        """Delete up to `limit` rows of a job's runs, so that writers never wait long; return how many were deleted."""
        keys = self._connection.execute(sa.select(runs.c.key).where(runs.c.job_id == job_id)).scalars().all()
        chosen = sa.select(*table.primary_key).where(table.c.run_key.in_(keys)).limit(limit).subquery("chosen")
        statement = sa.delete(table).where(sa.tuple_(*table.primary_key).in_(sa.select(*chosen.c)))
        return int(self._connection.execute(statement).rowcount)

    def _insert(self, table: sa.Table) -> Any:
        """Return an INSERT that supports ON CONFLICT, in the dialect of this database."""
        return postgresql.insert(table) if self._postgres else sqlite.insert(table)

    def _put(
        self, table: sa.Table, key: Mapping[str, Any], values: Mapping[str, Any], *, where: Any = None, **new: Any
    ) -> None:
        """Insert `values` and `new`; if the key exists and its row meets `where`, set `values` instead."""
        insert = self._insert(table).values(**key, **values, **new)
        self._connection.execute(insert.on_conflict_do_update(index_elements=list(key), set_=values, where=where))


def new_id(prefix: str) -> str:
    """Return a random id with its kind as a prefix, such as `job-4f1c0a9be2d37758`."""
    return f"{prefix}-{secrets.token_hex(8)}"


def same_fields(record: type, row: RowMap) -> dict[str, Any]:
    """Return the row's values under the names of the record's fields."""
    return {field.name: row[field.name] for field in fields(record) if field.name in row}
